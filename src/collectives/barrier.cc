// Barrier: an empty chunk that everybody publishes and waits for.
#include "collectives/collectives.h"

namespace hvd {

Task barrier(Channel& channel) {
  const uint64_t s = channel.next_chunk();
  for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
  channel.publish(s, 0);
  for (int m = 0; m < channel.size(); ++m) co_await channel.published(m, s);
  channel.finish(s);
}

}  // namespace hvd
