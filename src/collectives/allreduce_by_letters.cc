// Allreduce of one small tensor by a standing order (engine/standing_orders.h): each member sends its values to all
// others in one letter, over the network (transport/letter_boxes.h) or in shared memory (transport/trays.h), and folds
// what came. Everybody waits once.
//
// The same bits as every other way but the ring: those fold over the members of each host, round that to the tensor's
// type, and fold over the hosts (hosts_allreduce.cc). So does each member here, for all hosts.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"

namespace hvd {
namespace {

// What of a host's fold is kept at a time: still in the nearest cache when the hosts are folded.
constexpr size_t kFoldBytes = 4 << 10;

// Writes and publishes our letter for those of this host, if there are any. Returns what our values are: the tensor as
// it is, or if that is not what the others need, a copy.
const std::byte* write_letter(const Group& group, const Batch& batch, const Arithmetic& arithmetic,
                              const OrderRound& round, std::unique_ptr<std::byte[]>& copy) {
  const bool shares = group.members_here().size() > 1;
  if (!shares && batch.prescale == 1.0) return batch.input(0);
  if (!shares) copy = std::make_unique_for_overwrite<std::byte[]>(batch.bytes());
  const int me = group.channel().me();
  std::byte* const letter = shares ? group.trays().payload(me, round.tray, round.letter, batch.bytes()) : copy.get();
  arithmetic.copy_in(letter, batch.input(0), batch.bytes());
  if (shares) group.trays().publish(round.tray, round.letter, batch.bytes());
  return batch.prescale == 1.0 ? batch.input(0) : letter;
}

// Folds the values of all members: those of each host, and then what comes of the hosts.
void fold_by_hosts(const Group& group, const Arithmetic& arithmetic, const std::vector<const std::byte*>& values,
                   std::byte* output, size_t bytes) {
  const auto hosts = static_cast<size_t>(group.hosts());
  const size_t most = std::min(kFoldBytes, bytes);
  std::unique_ptr<std::byte[]> folded;
  if (hosts > 1 && !group.all_alone()) folded = std::make_unique_for_overwrite<std::byte[]>(hosts * most);
  std::vector<const void*> of_host, of_hosts(hosts);
  for (size_t lo = 0; lo < bytes; lo += kFoldBytes) {
    const size_t piece = hosts == 1 ? bytes : std::min(kFoldBytes, bytes - lo);
    for (size_t h = 0; h < hosts; ++h) {
      of_host.clear();
      for (const int m : group.members(static_cast<int>(h))) of_host.push_back(values[static_cast<size_t>(m)] + lo);
      if (hosts == 1) return arithmetic.fold(output, of_host, piece);
      of_hosts[h] = of_host.front();
      if (of_host.size() == 1) continue;
      std::byte* const partial = folded.get() + h * most;
      arithmetic.fold_partly(partial, of_host, piece);
      of_hosts[h] = partial;
    }
    arithmetic.fold(output + lo, of_hosts, piece);
  }
}

}  // namespace

Letter take_letter(Link& link, uint64_t order, size_t bytes) {
  Letter letter = link.boxes().take(order);
  if (letter.bytes == bytes) return letter;
  throw Error(HVD_SYSTEM, "rank " + std::to_string(link.rank()) + " has sent " + std::to_string(letter.bytes) +
                              " bytes where " + std::to_string(bytes) + " were agreed on");
}

Task allreduce_by_letters(const Group& group, const Batch& batch, const OrderRound& round) {
  const Arithmetic arithmetic(batch, group.size());
  const auto members = static_cast<size_t>(group.size());
  std::unique_ptr<std::byte[]> copy;
  const std::byte* const own = write_letter(group, batch, arithmetic, round, copy);
  std::vector<uint64_t> posted(members);
  for (size_t m = 0; m < members && group.hosts() > 1; ++m) {
    if (Link* const link = group.link(static_cast<int>(m))) posted[m] = link->post(round.order, own, batch.bytes());
  }
  for (int place = 0; place < static_cast<int>(group.members_here().size()); ++place) {
    if (place != group.channel().me()) co_await group.trays().published(place, round.tray, round.letter);
  }
  for (size_t m = 0; m < members && group.hosts() > 1; ++m) {
    Link* const link = group.link(static_cast<int>(m));
    if (link == nullptr) continue;
    co_await Until{{&link->boxes().arrived(round.order), round.number, link->rank(), 0}};
    // Who has ended an operation may leave, or write into its tensor: what the others need of it must be out by then.
    co_await Until{{&link->letters_sent(), posted[m], link->rank(), 0}};
  }
  std::vector<Letter> letters(members);
  std::vector<const std::byte*> values(members);
  for (size_t m = 0; m < members; ++m) {
    Link* const link = group.link(static_cast<int>(m));
    if (link == nullptr) continue;
    letters[m] = take_letter(*link, round.order, batch.bytes());
    values[m] = letters[m].data.get();
  }
  for (size_t place = 0; place < group.members_here().size(); ++place) {
    values[static_cast<size_t>(group.members_here()[place])] =
        group.trays().payload(static_cast<int>(place), round.tray, round.letter, batch.bytes());
  }
  values[static_cast<size_t>(group.me())] = own;
  fold_by_hosts(group, arithmetic, values, batch.output(0), batch.bytes());
  for (size_t m = 0; m < members; ++m) {
    if (letters[m].data) group.link(static_cast<int>(m))->boxes().reuse(std::move(letters[m]));
  }
}

}  // namespace hvd
