// Speaks for its host where the coordinator is on another one: tells it what the host's desk hears, and copies the log
// into the host's segment. Part of the engine of that host's local rank 0.
//
// Names become ready one by one while gradients appear. The first one after a pause is told at once; those that follow
// within kQuiet go together, unless a rank waits for one of them. So a step of many tensors costs few messages and
// wakes, and an operation that somebody waits for is never held back.
#ifndef HOROVOD_ENGINE_DELEGATE_H_
#define HOROVOD_ENGINE_DELEGATE_H_

#include <memory>

#include "engine/host_desk.h"
#include "engine/host_messages.h"
#include "engine/hosts.h"

namespace hvd {

class Delegate final : private HostDesk::Listener {
 public:
  Delegate(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, Doorbells& doorbells,
           Hosts& hosts);

  // As those of Coordinator.
  bool poll();
  bool has_news() const { return desk_.has_news(); }
  uint64_t prepare_sleep();
  bool ticking() const { return !ready_.items.empty() || desk_.ticking() || desk_.releasing(); }
  void look_closely_next() { polls_ = kPollsPerLook - 1; }

 private:
  static constexpr uint64_t kPollsPerLook = 64;  // for stalls

  void request(int rank, const ToCoordinator& message, BytesView bytes) override;
  void ready(uint32_t id, bool wanted, bool with_joined) override;
  void wanted(uint32_t id) override;
  void released(uint32_t id) override;
  void waiting(uint32_t id, const std::vector<int>& missing) override;
  void send(const FromHost& message) { hosts_.send_to_all(encode(message)); }
  void tell_ready();

  const Settings& settings_;
  Hosts& hosts_;
  HostDesk desk_;
  Ready ready_;          // not told yet
  bool urgent_ = false;  // somebody waits for one of them
  Nanoseconds last_told_ = 0, last_stall_check_ = 0;
  uint64_t polls_ = 0;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_DELEGATE_H_
