// The connections between those who speak for their hosts: local rank 0 of each host, and the coordinator, which is one
// of them. This has what both ends need: heartbeats, and who is gone.
//
// A rank of another host is gone when its host says so (or the coordinator, who passes it on). A host's local rank 0 is
// gone when the connection to it has ended, and all ranks of a host are if it has been silent for the heartbeat's
// timeout. Who finds out writes it into the departures of its own segment, where the ranks of its host see it. Said
// once, it stays.
//
// Used by the driver alone.
#ifndef HOROVOD_ENGINE_HOSTS_H_
#define HOROVOD_ENGINE_HOSTS_H_

#include <functional>
#include <memory>
#include <vector>

#include "engine/host_messages.h"
#include "engine/liveness.h"
#include "engine/world.h"
#include "transport/doorbell.h"
#include "transport/network.h"
#include "transport/segment.h"

namespace hvd {

class Hosts {
 public:
  Hosts(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, Doorbells& doorbells,
        const Liveness& liveness, Network& network);

  // Whether there is nobody to talk to: one host, or this rank does not speak for its host.
  bool alone() const { return peers_.empty(); }
  // Calls f(host, record) for every record that has come. True if there were any.
  bool take(const std::function<void(int host, BytesView record)>& f);
  void send_to_all(BytesView record);
  // Beats, and looks for hosts and for ranks of this host that are gone. True if there are new ones.
  bool look_after();
  // A host has said this.
  void told_gone(int from_host, const Gone& gone);
  // This rank leaves, and says nothing more.
  void say_farewell(RankState state, int cause);

 private:
  struct Peer {
    int host;
    int rank;  // that speaks for it
    Records* records;
    bool heard = true;
    bool over = false;
    Nanoseconds silent_for = 0;
  };

  void spread(const Gone& gone, int except_host);

  const World& world_;
  const std::shared_ptr<Segment> segment_;
  Doorbells& doorbells_;
  const Liveness& liveness_;
  Nanoseconds (*const now_)();
  const Nanoseconds timeout_, interval_;
  std::vector<Peer> peers_;
  std::vector<bool> known_gone_;  // by rank
  Nanoseconds last_beat_ = 0;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_HOSTS_H_
