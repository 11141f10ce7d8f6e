// Broadcast over several hosts. Each host has a *gate*: the root itself on its host, the member at place 0 on the
// others. Gates form a binary tree below the root's; each passes a chunk on to its children as soon as it has it, and
// puts it into its host's shared memory, from where the other members copy it.
//
// With the hosts numbered from the root's, host i receives from host (i - 1) / 2 and sends to 2 i + 1 and 2 i + 2.
#include <optional>

#include "collectives/collectives.h"
#include "kernels/kernels.h"

namespace hvd {
namespace {

class Tree {
 public:
  Tree(const Group& group, int root) : group_(group) {
    for (int h = 0; h < group.hosts(); ++h) {
      const auto& members = group.members(h);
      const auto place = std::find(members.begin(), members.end(), root);
      if (place == members.end()) continue;
      root_host_ = h;
      root_place_ = static_cast<int>(place - members.begin());
    }
    const int n = group.hosts(), mine = (group.host() - root_host_ + n) % n;
    if (mine > 0) parent_ = gate_stream((mine - 1) / 2);
    for (const int child : {2 * mine + 1, 2 * mine + 2}) {
      if (child < n) children_.push_back(gate_stream(child));
    }
    gate_ = mine == 0 ? root_place_ : 0;
  }

  // The place of this host's gate.
  int gate() const { return gate_; }
  std::optional<Stream>& parent() { return parent_; }
  std::vector<Stream>& children() { return children_; }

 private:
  Stream gate_stream(int from_root) const {
    const int host = (root_host_ + from_root) % group_.hosts();
    return group_.stream(host, from_root == 0 ? root_place_ : 0);
  }

  const Group& group_;
  int root_host_ = 0, root_place_ = 0, gate_ = 0;
  std::optional<Stream> parent_;
  std::vector<Stream> children_;
};

}  // namespace

Task broadcast_between_hosts(const Group& group, const Batch& batch) {
  Channel& channel = group.channel();
  Tree tree(group, batch.root);
  const bool is_gate = channel.me() == tree.gate();
  const bool is_root = group.me() == batch.root;
  // Only gates have streams here; others' would lead to ranks that do not expect them.
  for (size_t lo = 0; lo < batch.bytes(); lo += Channel::kChunkBytes) {
    const size_t bytes = std::min(Channel::kChunkBytes, batch.bytes() - lo);
    const uint64_t s = channel.next_chunk();
    std::byte* const chunk = channel.payload(tree.gate(), s, bytes);
    std::vector<uint64_t> sent;
    if (is_gate) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
      if (is_root) {
        batch.for_pieces(lo, lo + bytes, [chunk](const std::byte* input, std::byte* output, size_t offset, size_t n) {
          copy_bytes(chunk + offset, input, n);
          if (output != input) copy_bytes(output, input, n);
        });
      } else {
        const uint64_t position = tree.parent()->receive(chunk, bytes);
        co_await tree.parent()->received(position);
      }
      for (Stream& child : tree.children()) sent.push_back(child.send(chunk, bytes));
      channel.publish(s, bytes);
    } else {
      co_await channel.published(tree.gate(), s);
    }
    if (!is_root) {
      batch.for_pieces(lo, lo + bytes, [chunk](const std::byte*, std::byte* output, size_t offset, size_t n) {
        copy_bytes(output, chunk + offset, n);
      });
    }
    // The slot is used again when we are done with it, so what we send from it must be out.
    for (size_t i = 0; i < sent.size(); ++i) co_await tree.children()[i].sent(sent[i]);
    channel.finish(s);
    if (lo + bytes < batch.bytes()) co_await LetOthers{};
  }
}

}  // namespace hvd
