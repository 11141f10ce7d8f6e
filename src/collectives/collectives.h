// The collectives on shared memory, each in a file of its own. All members of the channel run the same one with the
// same batch layout; a task refers to its arguments, which must outlive it.
#ifndef HOROVOD_COLLECTIVES_COLLECTIVES_H_
#define HOROVOD_COLLECTIVES_COLLECTIVES_H_

#include "collectives/batch.h"
#include "collectives/task.h"
#include "transport/arena.h"
#include "transport/channel.h"

namespace hvd {

Task allreduce(Channel& channel, const Batch& batch, PeerArenas& arenas);
Task adasum(Channel& channel, const Batch& batch);
Task broadcast(Channel& channel, const Batch& batch);
Task barrier(Channel& channel);
// Allgather and alltoall.
Task move_rows(Channel& channel, const Batch& batch);
Task reducescatter(Channel& channel, const Batch& batch);
// How many of a reducescatter's rows a member gets.
int64_t rows_of(int member, int members, int64_t rows);

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_COLLECTIVES_H_
