#include "engine/delegate.h"

#include <limits>

#include "engine/coordinator.h"

namespace hvd {

Delegate::Delegate(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, Doorbells& doorbells,
                   Hosts& hosts)
    : settings_(settings),
      hosts_(hosts),
      desk_(world, segment, doorbells, static_cast<size_t>(segment->cache_capacity()) + Coordinator::kUncachedIds) {}

bool Delegate::poll() {
  bool moved = hosts_.take([this](int host, BytesView bytes) {
    const ToHost message = decode_to_host(bytes);
    if (const auto* logged = std::get_if<Logged>(&message)) {
      desk_.append(decode_log_entry(logged->entry), logged->entry);
    } else if (const auto* gone = std::get_if<Gone>(&message)) {
      hosts_.told_gone(host, *gone);
    }
  });
  moved |= desk_.poll(*this);
  if (!ready_.items.empty() && (urgent_ || settings_.now() - last_told_ >= HostDesk::kQuiet)) tell_ready();
  if (++polls_ % kPollsPerLook == 0 && (settings_.stall_warning > 0 || settings_.stall_shutdown > 0)) {
    const Nanoseconds now = settings_.now();
    if (now - last_stall_check_ >= Coordinator::kStallCheckInterval) {
      last_stall_check_ = now;
      desk_.look_for_waiting(*this);
    }
  }
  return moved;
}

uint64_t Delegate::prepare_sleep() {
  // While names gather we look again by ourselves.
  desk_.wake_after(ready_.items.empty() ? 1 : std::numeric_limits<uint64_t>::max());
  return interest::kUrgent | interest::kRequest;
}

void Delegate::tell_ready() {
  send(ready_);
  ready_.items.clear();
  urgent_ = false;
  last_told_ = settings_.now();
}

void Delegate::request(int rank, const ToCoordinator&, BytesView bytes) {
  // Before what else a rank says: a joined rank's last tensors come before its Join.
  if (!ready_.items.empty()) tell_ready();
  send(Forward{rank, Bytes(bytes.begin(), bytes.end())});
}
void Delegate::ready(uint32_t id, bool wanted, bool with_joined) {
  ready_.items.push_back({id, wanted, with_joined});
  urgent_ |= wanted;
}
void Delegate::wanted(uint32_t id) {
  for (Ready::Item& item : ready_.items) {
    if (item.id != id) continue;
    item.wanted = urgent_ = true;
    return;
  }
  send(Wanted{id});
}
void Delegate::released(uint32_t id) {
  if (!ready_.items.empty()) tell_ready();
  send(Released{id});
}
void Delegate::waiting(uint32_t id, const std::vector<int>& missing) { send(Waiting{id, missing}); }

}  // namespace hvd
