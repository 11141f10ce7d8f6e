// All connections of this rank to other hosts: its links, and the control connections if it speaks for its host.
//
// One epoll descriptor watches them all; it is itself watched where the engine sleeps. Used by the driver alone, except
// fd().
#ifndef HOROVOD_TRANSPORT_NETWORK_H_
#define HOROVOD_TRANSPORT_NETWORK_H_

#include <memory>
#include <vector>

#include "transport/link.h"
#include "transport/records.h"

namespace hvd {

class Network {
 public:
  // links: by rank, controls: by host, with their names. A connection is lost when its other end's kernel has not
  // answered for so many seconds; where bytes are under way, see give_up_unconfirmed(). Throws SystemError.
  Network(const std::vector<Connected>& links, const std::vector<Connected>& controls,
          const std::vector<std::string>& hosts, double timeout, Counters& counters);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  bool empty() const { return epoll_ < 0; }
  // Readable when poll() has something to do, after listen().
  int fd() const { return epoll_; }
  // To be called before a thread sleeps: see poll(rank).
  void listen();
  // Moves what can be moved. True if anything did. Throws Error, which names the rank or host, if a peer has sent what
  // makes no sense; its connection is then lost.
  bool poll();
  // The part of it that reads what comes from one rank, with which there must be a connection: one system call, not
  // two. If that has found something again and again, the connection is made *quiet*: nobody watches it until listen().
  // What comes then costs the kernel less, on the sender's time if both hosts are on one machine.
  bool poll(int rank);
  // The part of it that sends what was queued.
  bool flush();
  // Whether something that was queued waits for a socket to take it.
  bool blocked() const;

  // Null where there is none.
  Link* link(int rank) const { return links_[static_cast<size_t>(rank)].get(); }
  Records* control(int host) const { return controls_[static_cast<size_t>(host)].get(); }

  // Sends what was queued, and waits a little until the others have taken leave too: then nothing that is under way can
  // be lost by closing. While somebody's kernel has not taken all yet, waits for as long as patience_ms.
  void take_leave(int timeout_ms, int patience_ms);
  void abandon();

  // Gives up connections over which nothing gets through: what was sent is under way, has been sent again, and for the
  // timeout none of it was confirmed. Looks now and then, however often it is called. True if one was given up.
  bool give_up_unconfirmed(uint64_t now);

  // How many connections have ended, by a last word or without: grows.
  int ended() const { return ended_; }
  // Grows whenever bytes went through a link.
  uint64_t link_moves() const { return link_moves_; }

  std::vector<int> descriptors() const;

 private:
  struct Watched {
    Link* link = nullptr;
    Records* records = nullptr;
    std::string who;
    bool for_writing = false, counted = false, watched = false, quiet = false;
    int finds = 0;  // of poll(rank), since somebody listened
    uint64_t confirmed = 0, unconfirmed_for = 0;
    const Wire& wire() const { return link != nullptr ? link->wire() : records->wire(); }
  };

  void watch(Watched& watched, bool for_writing, bool quiet = false);
  bool serve(size_t index, bool readable);
  bool move(Watched& watched, bool readable);
  bool has_bytes_under_way() const;

  const double timeout_;
  Link::Shared shared_;
  std::vector<std::unique_ptr<Link>> links_;        // by rank
  std::vector<std::unique_ptr<Records>> controls_;  // by host
  std::vector<Watched> watched_;
  std::vector<size_t> index_of_link_;
  std::vector<size_t> quiet_;  // indices of those in watched_
  int epoll_ = -1;
  bool fresh_ = true;  // nothing was read yet
  int ended_ = 0;
  uint64_t link_moves_ = 0;
  uint64_t last_look_ = 0;  // of give_up_unconfirmed()
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_NETWORK_H_
