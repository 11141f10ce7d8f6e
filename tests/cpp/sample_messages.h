// One message of every kind, for tests that damage them.
#ifndef HOROVOD_TESTS_SAMPLE_MESSAGES_H_
#define HOROVOD_TESTS_SAMPLE_MESSAGES_H_

#include <vector>

#include "engine/host_messages.h"
#include "engine/messages.h"

namespace hvd::testing {

inline Meta some_meta() {
  Meta meta;
  meta.op = HVD_BROADCAST;
  meta.dtype = HVD_COMPLEX128;
  meta.reduce_op = HVD_MAX;
  meta.root = 3;
  meta.prescale = 0.5;
  meta.postscale = -2.25;
  meta.shape = {kAnyRows, 0, 1LL << 40};
  return meta;
}

inline std::vector<Bytes> some_log() {
  const Key key{2, "a name"};
  const Meta meta = some_meta();
  return {encode(LogEntry(Define{7, key, meta})),
          encode(LogEntry(Run{{1, 2, 3, 70000}})),
          encode(LogEntry(Evict{9})),
          encode(LogEntry(Refuse{{0, ""}, "a text"})),
          encode(LogEntry(Stop{HVD_STALLED, "why"})),
          encode(LogEntry(AddSet{4, {0, 2, 5}})),
          encode(LogEntry(RemoveSet{4})),
          encode(LogEntry(RemoveEnd{4})),
          encode(LogEntry(JoinEnd{6})),
          encode(LogEntry(Stand{1LL << 33, 5, 3, 1LL << 35})),
          encode(LogEntry(Settle{1LL << 33, 1LL << 34})),
          encode(LogEntry(BeginSequence{3, 15, {4, 2, 70000}})),
          encode(LogEntry(RunSequence{3, 1LL << 33, 1LL << 34})),
          encode(LogEntry(EndSequence{3}))};
}

inline std::vector<Bytes> some_requests() {
  const Key key{1, "x"};
  const Meta meta = some_meta();
  return {encode(ToCoordinator(Submit{key, meta, true})),
          encode(ToCoordinator(Want{key})),
          encode(ToCoordinator(Closed{5})),
          encode(ToCoordinator(Revoke{7, true})),
          encode(ToCoordinator(Ended{7, 1LL << 34})),
          encode(ToCoordinator(Vacated{7})),
          encode(ToCoordinator(Disorder{3})),
          encode(ToCoordinator(Arrived{3}))};
}

inline std::vector<Bytes> some_from_host() {
  return {encode(FromHost(Forward{3, some_requests()[0]})),
          encode(FromHost(Ready{{{1, false, false}, {2, true, false}, {70000, false, true}, {4, true, true}}})),
          encode(FromHost(Wanted{8})),
          encode(FromHost(Released{9})),
          encode(FromHost(Waiting{7, {1, 3}})),
          encode(FromHost(Gone{2, kBroken, 1})),
          encode(FromHost(Beat{}))};
}

inline std::vector<Bytes> some_to_host() {
  std::vector<Bytes> messages;
  for (const Bytes& entry : some_log()) messages.push_back(encode(ToHost(Logged{entry})));
  messages.push_back(encode(ToHost(Gone{2, kSilent, -1})));
  messages.push_back(encode(ToHost(Beat{})));
  return messages;
}

}  // namespace hvd::testing
#endif  // HOROVOD_TESTS_SAMPLE_MESSAGES_H_
