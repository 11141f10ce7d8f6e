// The desk of one host: local rank 0 takes in there what the ranks of its host submit, and writes the log for them. On
// the coordinator's host its listener is the coordinator itself, elsewhere the connection to it (delegate.h).
//
// Slots, rounds and the ready ring (transport/segment.h) are the host's own: a round is complete when the set's members
// on this host have arrived. Rounds can't overlap: a rank submits a name again only after the batch that ended its last
// round, and that batch is logged only when every host's round was complete.
//
// A rank that has joined counts as having submitted whatever another rank of the host has: the desk arrives in the
// slots on its behalf. While anybody has joined it looks again every kQuiet, since submissions that do not complete a
// round don't wake it.
//
// A withdrawn id is released, and its slot emptied, when every rank of the host has read the Evict: until then somebody
// may still arrive there. What was ready before that has been told by then, because who arrives has not read the Evict.
//
// Used by the driver alone.
#ifndef HOROVOD_ENGINE_HOST_DESK_H_
#define HOROVOD_ENGINE_HOST_DESK_H_

#include <deque>
#include <memory>
#include <vector>

#include "engine/messages.h"
#include "engine/world.h"
#include "transport/byte_ring.h"
#include "transport/counters.h"
#include "transport/doorbell.h"
#include "transport/segment.h"

namespace hvd {

class HostDesk {
 public:
  static constexpr Nanoseconds kQuiet = 1'000'000;

  // Who hears what happens on the host; the meanings are those of host_messages.h.
  class Listener {
   public:
    // The message, and the bytes that it came in.
    virtual void request(int rank, const ToCoordinator& message, BytesView bytes) = 0;
    virtual void ready(uint32_t id, bool wanted, bool with_joined) = 0;
    virtual void wanted(uint32_t id) = 0;
    virtual void released(uint32_t id) = 0;
    virtual void waiting(uint32_t id, const std::vector<int>& missing) = 0;

   protected:
    ~Listener() = default;
  };

  HostDesk(const World& world, std::shared_ptr<Segment> segment, Doorbells& doorbells, size_t ids);

  // Takes in what ranks of the host submitted. True if anything happened. Throws BadMessage.
  bool poll(Listener& listener);
  // Whether poll() would find something new; safe to ask after arming the doorbell.
  bool has_news() const;
  // How many more names must become ready before that is worth a wake.
  void wake_after(uint64_t names);
  // Whether something waits for the log's readers, who ring nobody, or for ranks that may submit unheard: poll() must
  // be called again within kQuiet.
  bool ticking() const { return !outbox_.empty() || !joined_.empty(); }
  bool releasing() const { return !withdrawn_.empty(); }
  // Writes an entry into the host's log. `entry` is what `bytes` decodes to.
  void append(const LogEntry& entry, Bytes bytes);
  // Tells the listener of names that only some ranks of the host have submitted at this moment.
  void look_for_waiting(Listener& listener);
  // Whether ranks that have joined may still arrive themselves: then the desk must not do so for them.
  void joined_may_arrive(bool may) { joined_may_arrive_ = may; }
  // Tells what is complete with the ranks that have joined.
  void submit_for_joined(Listener& listener);
  // Whether nobody on this host is about to submit the id.
  bool idle(uint32_t id) const;

 private:
  struct Id {
    bool live = false;
    bool told = false;  // ready, and not logged since
    bool told_wanted = false;
    bool with_joined = false;  // we have arrived in the current round for a rank that has joined
    int set = 0;
    uint64_t members = 0;  // of the set, on this host
    uint64_t rounds = 0;   // complete rounds of the slot that were told
  };
  struct Withdrawn {
    uint32_t id;
    uint64_t entry;             // index of its Evict
    uint64_t log_position = 0;  // end of it, once it is in the log
  };

  bool cached(uint32_t id) const { return id < static_cast<uint32_t>(segment_->cache_capacity()); }
  Slot& slot(uint32_t id) const { return segment_->slot(static_cast<int>(id)); }
  uint64_t current_round(uint32_t id) const { return slot(id).arrived.load() / ids_[id].members; }
  std::vector<int> missing_ranks(uint32_t id) const;
  bool take_requests(Listener& listener);
  bool take_ready(Listener& listener);
  void tell(uint32_t id, Listener& listener);
  void arrive_for_joined(Listener& listener);
  void look_at_wants(Listener& listener);
  void release(uint64_t read, Listener& listener);
  void note(const LogEntry& entry);
  bool flush_outbox();
  uint64_t slowest_reader() const;
  uint64_t members_here(const std::vector<int>& ranks) const;

  const World& world_;
  const std::shared_ptr<Segment> segment_;
  Doorbells& doorbells_;

  std::vector<RingReader> requests_;  // by local rank
  RingWriter log_;
  std::deque<Bytes> outbox_;  // entries for which the log had no room
  uint64_t appended_ = 0;     // entries ever appended, those in the outbox included
  uint64_t logged_ = 0;       // entries in the log
  uint64_t ready_head_ = 0;   // tickets taken from the ready ring
  uint64_t want_epoch_ = 0;

  std::vector<Id> ids_;
  std::vector<std::vector<int>> sets_;  // by id, ranks ascending
  std::vector<uint32_t> told_;          // ids with `told`, some perhaps logged since
  std::deque<Withdrawn> withdrawn_;
  std::vector<int> joined_;  // ranks of this host
  bool joined_may_arrive_ = false;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_HOST_DESK_H_
