// Who takes part in a collective, as one member sees it.
//
// Words. The members of a process set are numbered in the order of their ranks. Those on one host share memory (the
// *channel*) and have *places* 0, 1, ... there, in the same order. Members on different hosts reach each other by
// *streams* (transport/link.h), of which each pair has one in each direction.
#ifndef HOROVOD_COLLECTIVES_GROUP_H_
#define HOROVOD_COLLECTIVES_GROUP_H_

#include <array>
#include <memory>
#include <vector>

#include "collectives/task.h"
#include "engine/world.h"
#include "transport/aligned.h"
#include "transport/channel.h"
#include "transport/network.h"
#include "transport/trays.h"

namespace hvd {

// The two streams between this member and one on another host.
class Stream {
 public:
  Stream(Link& link, int lane) : link_(&link), lane_(lane) {}

  // See Link: the memory is the stream's until sent() or received() of the returned position.
  uint64_t send(const std::byte* data, size_t bytes) { return link_->send(lane_, data, bytes); }
  uint64_t receive(std::byte* into, size_t bytes) { return link_->receive(lane_, into, bytes); }
  Until sent(uint64_t position) { return {{&link_->sent(lane_), position, link_->rank(), 0}}; }
  Until received(uint64_t position) { return {{&link_->received(lane_), position, link_->rank(), 0}}; }

 private:
  Link* link_;
  int lane_;
};

class Group {
 public:
  // The channel and the trays are those of the members on this host, of which we are one.
  Group(const World& world, int set, const std::vector<int>& ranks, std::unique_ptr<Channel> channel,
        std::unique_ptr<Trays> trays, Network& network)
      : set_(set), channel_(std::move(channel)), trays_(std::move(trays)), network_(network), ranks_(ranks) {
    for (const int host : world.hosts_of(ranks)) {
      if (host == world.host) host_ = static_cast<int>(hosts_.size());
      hosts_.emplace_back();
      for (size_t m = 0; m < ranks.size(); ++m) {
        if (world.host_of[static_cast<size_t>(ranks[m])] == host) hosts_.back().push_back(static_cast<int>(m));
      }
    }
    me_ = members_here()[static_cast<size_t>(channel_->me())];
  }

  Channel& channel() const { return *channel_; }
  Trays& trays() const { return *trays_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int me() const { return me_; }
  int hosts() const { return static_cast<int>(hosts_.size()); }
  // Ours among the set's hosts.
  int host() const { return host_; }
  // The members on one of the set's hosts, by place.
  const std::vector<int>& members(int host) const { return hosts_[static_cast<size_t>(host)]; }
  const std::vector<int>& members_here() const { return members(host_); }
  // The stream with a member on another host.
  Stream stream(int member) const { return {*network_.link(ranks_[static_cast<size_t>(member)]), set_}; }
  Stream stream(int host, int place) const { return stream(members(host)[static_cast<size_t>(place)]); }
  // The same two for a standing order with a tray, whose lane nobody else uses.
  Channel& channel_of_order(int tray) const { return *channels_of_orders_[static_cast<size_t>(tray)]; }
  Stream stream_of_order(int host, int place, int tray) const {
    return {*link(members(host)[static_cast<size_t>(place)]), lane_of_tray(tray)};
  }
  static int lane_of_tray(int tray) { return Segment::kMaxSets + tray; }
  // Makes such a channel, for an order that begins. False: there is no memory for it.
  bool open_channel(int tray) {
    std::unique_ptr<Channel>& channel = channels_of_orders_[static_cast<size_t>(tray)];
    channel = channel_->open_another(lane_of_tray(tray));
    return channel != nullptr;
  }
  // The connection with a member on another host; null for those on ours.
  Link* link(int member) const { return network_.link(ranks_[static_cast<size_t>(member)]); }
  // Whether every member is alone on its host.
  bool all_alone() const { return hosts_.size() == ranks_.size(); }
  // Memory for one batch, which has the set for itself: it stays for the next one, so that its pages do. Not cleared.
  std::byte* scratch(size_t bytes) const { return scratch_.of(bytes); }
  // The same for a round of a standing order, which has its tray for itself.
  std::byte* scratch_of_order(int tray, size_t bytes) const {
    return scratch_of_orders_[static_cast<size_t>(tray)].of(bytes);
  }

 private:
  class Scratch {
   public:
    std::byte* of(size_t bytes) {
      if (bytes > bytes_) {
        memory_.reset();
        memory_ = make_aligned(bytes);
        bytes_ = bytes;
      }
      return memory_.get();
    }

   private:
    AlignedBytes memory_;
    size_t bytes_ = 0;
  };

  const int set_;
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Trays> trays_;
  Network& network_;
  const std::vector<int> ranks_;
  std::vector<std::vector<int>> hosts_;
  int host_ = 0, me_ = 0;
  mutable Scratch scratch_;
  mutable std::array<Scratch, Trays::kTrays> scratch_of_orders_;
  std::array<std::unique_ptr<Channel>, Trays::kTrays> channels_of_orders_;
};

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_GROUP_H_
