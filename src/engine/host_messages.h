// The records between the ranks that speak for their hosts (local rank 0 of each) and the coordinator.
//
// As those of messages.h: every read is checked, and what does not parse throws BadMessage.
#ifndef HOROVOD_ENGINE_HOST_MESSAGES_H_
#define HOROVOD_ENGINE_HOST_MESSAGES_H_

#include "engine/messages.h"
#include "transport/segment.h"

namespace hvd {

// A rank of the host has sent this to the coordinator.
struct Forward {
  int32_t rank = 0;
  Bytes message;  // a ToCoordinator
};
// On this host everybody has submitted these.
struct Ready {
  struct Item {
    uint32_t id = 0;
    bool wanted = false;       // a rank of the host waits for it
    bool with_joined = false;  // for some only because they have joined
    bool operator==(const Item&) const = default;
  };
  std::vector<Item> items;
};
// A rank of the host begins to wait for an id that was Ready before.
struct Wanted {
  uint32_t id = 0;
};
// The host has nothing to do with a withdrawn id any more.
struct Released {
  uint32_t id = 0;
};
// Some of the host's ranks have submitted an id, but these have not.
struct Waiting {
  uint32_t id = 0;
  std::vector<int> missing;
};
// A rank is gone. In both directions.
struct Gone {
  int32_t rank = 0;
  RankState state = kEnded;
  int32_t cause = -1;  // of kBroken: the rank because of which
};
// The sender lives. In both directions.
struct Beat {};
using FromHost = std::variant<Forward, Ready, Wanted, Released, Waiting, Gone, Beat>;

// The next entry of the log.
struct Logged {
  Bytes entry;  // a LogEntry
};
using ToHost = std::variant<Logged, Gone, Beat>;

Bytes encode(const FromHost& message);
Bytes encode(const ToHost& message);
FromHost decode_from_host(BytesView bytes);
ToHost decode_to_host(BytesView bytes);

}  // namespace hvd
#endif  // HOROVOD_ENGINE_HOST_MESSAGES_H_
