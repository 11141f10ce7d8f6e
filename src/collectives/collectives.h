// The collectives, each in a file of its own: on shared memory, where all members are on one host, and between hosts.
// All members run the same one with the same batch layout; a task refers to its arguments, which must outlive it.
#ifndef HOROVOD_COLLECTIVES_COLLECTIVES_H_
#define HOROVOD_COLLECTIVES_COLLECTIVES_H_

#include "collectives/batch.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "transport/arena.h"
#include "transport/channel.h"

namespace hvd {

Task allreduce(Channel& channel, const Batch& batch, PeerArenas& arenas);
Task allreduce_between_hosts(const Group& group, const Batch& batch, bool ring);
// As a gather of allreduce_between_hosts, where this member is alone on its host.
Task allreduce_alone_on_host(const Group& group, const Batch& batch);
// One round of a standing order.
struct OrderRound {
  uint64_t order = 0;   // 0: none
  uint64_t number = 0;  // 1, 2, ...
  int tray = -1;        // where members share a host, or use a lane; else -1
  uint64_t letter = 0;  // its number there
  bool by_lane = false;
  bool* begun_by_all = nullptr;  // of one by a lane: set when the letters of all others have come
};
// Where every member is alone on its host: each folds a part. (The task has its own copy of the round, if there is
// one. So does the next.)
Task allreduce_by_parts(const Group& group, const Batch& batch, OrderRound round = {});
// Where some share one. A round of an order needs as many members on all hosts.
Task allreduce_by_chunks(const Group& group, const Batch& batch, bool ring, OrderRound round = {});
// The bytes of such a round's letters on a host.
size_t first_chunk_of_order(size_t bytes);
Task allreduce_by_letters(const Group& group, const Batch& batch, const OrderRound& round);
// The same for the other collectives, where all members share a host.
Task run_by_letters(const Group& group, const Batch& batch, const OrderRound& round);
// The next letter of a link for an order. Throws Error if it has not so many bytes.
Letter take_letter(Link& link, uint64_t order, size_t bytes);
// The bytes of a letter with the rows of an allgather or alltoall.
size_t letter_bytes(const std::vector<int64_t>& counts, size_t row_bytes);
Task adasum(const Group& group, const Batch& batch);
Task broadcast(Channel& channel, const Batch& batch);
Task broadcast_between_hosts(const Group& group, const Batch& batch);
// Allgather and alltoall.
Task move_rows(const Group& group, const Batch& batch);
Task reducescatter(Channel& channel, const Batch& batch);
Task reducescatter_between_hosts(const Group& group, const Batch& batch);
// How many of a reducescatter's rows a member gets.
int64_t rows_of(int member, int members, int64_t rows);

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_COLLECTIVES_H_
