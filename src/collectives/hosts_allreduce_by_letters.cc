// Allreduce of one small tensor whose members are all alone on their hosts, by a standing order
// (engine/standing_orders.h): each sends its values to all others in one letter, and folds what came in the order of
// hosts. One trip; the same bits as every other way but the ring.
#include <memory>
#include <string>
#include <vector>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"

namespace hvd {
namespace {

// What is sent: the tensor as it is, or if that is not what the others need, a copy.
const std::byte* write_letter(const Batch& batch, const Arithmetic& arithmetic, std::unique_ptr<std::byte[]>& copy) {
  if (batch.prescale == 1.0) return batch.input(0);
  copy = std::make_unique_for_overwrite<std::byte[]>(batch.bytes());
  arithmetic.copy_in(copy.get(), batch.input(0), batch.bytes());
  return copy.get();
}

Letter take_letter(Link& link, uint64_t order, size_t bytes) {
  Letter letter = link.boxes().take(order);
  if (letter.bytes == bytes) return letter;
  throw Error(HVD_SYSTEM, "rank " + std::to_string(link.rank()) + " has sent " + std::to_string(letter.bytes) +
                              " bytes where " + std::to_string(bytes) + " were agreed on");
}

}  // namespace

Task allreduce_by_letters(const Group& group, const Batch& batch, uint64_t order, uint64_t round) {
  const Arithmetic arithmetic(batch, group.size());
  const auto hosts = static_cast<size_t>(group.hosts());
  std::unique_ptr<std::byte[]> copy;
  const std::byte* const own = write_letter(batch, arithmetic, copy);
  std::vector<uint64_t> posted(hosts);
  for (int h = 0; h < group.hosts(); ++h) {
    if (h != group.host()) posted[static_cast<size_t>(h)] = group.link(h).post(order, own, batch.bytes());
  }
  for (int h = 0; h < group.hosts(); ++h) {
    if (h == group.host()) continue;
    Link& link = group.link(h);
    co_await Until{{&link.boxes().arrived(order), round, link.rank(), 0}};
    // Who has ended an operation may leave, or write into its tensor: what the others need of it must be out by then.
    co_await Until{{&link.letters_sent(), posted[static_cast<size_t>(h)], link.rank(), 0}};
  }
  std::vector<Letter> letters(hosts);
  std::vector<const void*> sources(hosts);
  for (int h = 0; h < group.hosts(); ++h) {
    const auto i = static_cast<size_t>(h);
    if (h != group.host()) letters[i] = take_letter(group.link(h), order, batch.bytes());
    sources[i] = h == group.host() ? own : letters[i].data.get();
  }
  arithmetic.fold(batch.output(0), sources, batch.bytes());
  for (int h = 0; h < group.hosts(); ++h) {
    if (h != group.host()) group.link(h).boxes().reuse(std::move(letters[static_cast<size_t>(h)]));
  }
}

}  // namespace hvd
