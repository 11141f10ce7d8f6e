// Submission: from a request to an arrival in its name's slot, or to a message for the coordinator.
#include "engine/engine.h"

namespace hvd {

void Engine::submit(const std::shared_ptr<Request>& request, bool will_wait) {
  std::unique_lock lock(mutex_);
  validate(*request);
  request->wanted = will_wait;
  submit_locked(request);
  if (request->order != 0) send_letters(lock);
}

void Engine::submit_locked(const std::shared_ptr<Request>& request) {
  if (stopping_) throw Error(HVD_SHUT_DOWN, "Horovod has been shut down.");
  if (failure_) throw Error(failure_->status, failure_->text);
  NameEntry& entry = names_[request->key];
  if (entry.pending) {
    throw InvalidError(
        "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
        "currently being processed: '" +
        request->key.name + "'. Give each tensor a name of its own, or wait for the first operation to end.");
  }
  entry.pending = request;
  request->bytes = request->meta.bytes();
  ++pending_;
  counters_.requests_submitted.add();
  const bool cached = entry.id >= 0 && entry.id < segment_->cache_capacity();
  if (cached && ids_[static_cast<size_t>(entry.id)].meta == request->meta) {
    request->id = entry.id;
    counters_.requests_by_bit.add();
    if (const uint64_t order = ids_[static_cast<size_t>(entry.id)].order; order != 0) {
      submit_to_order(request, order);
    } else if (ids_[static_cast<size_t>(entry.id)].in_sequence) {
      submit_in_sequence(*request);
    } else {
      arrive(*request);
    }
  } else {
    send(Submit{request->key, request->meta, request->wanted}, request->wanted);
  }
}

// Joins the current round of the name's slot: see engine/coordinator.h.
void Engine::arrive(Request& request) {
  Slot& slot = segment_->slot(request.id);
  const uint64_t members = members_here(request.key.set);
  const int me = world_.local_rank;
  request.by_bit = true;
  // The round can't end without us, so it is the same before and after our arrival.
  request.round = slot.arrived.load() / members + 1;
  if (request.wanted) slot.wanted.store(request.round);
  slot.present[me / 64].fetch_xor(uint64_t{1} << (me % 64));
  const uint64_t count = slot.arrived.fetch_add(1) + 1;
  if (count % members != 0) return;

  CoordinatorLine& coordinator = segment_->coordinator();
  const uint64_t ticket = coordinator.ready_tail.fetch_add(1);
  ReadyCell& cell = segment_->ready_cell(ticket);
  cell.id = static_cast<uint64_t>(request.id);
  cell.sequence.store(ticket + 1);
  if (slot.wanted.load() >= request.round || ticket + 1 >= coordinator.wake_ticket.load()) {
    doorbells_.ring(0, interest::kUrgent);
  }
}

void Engine::send(const ToCoordinator& message, bool urgent) {
  counters_.request_messages.add();
  Bytes bytes = encode(message);
  const uint64_t read = segment_->request_lines(world_.local_rank).read.load();
  if (!outbox_.empty() || !requests_.write(bytes, read)) {
    const bool first = outbox_.empty();
    outbox_.push_back(std::move(bytes));
    outbox_waits_ = true;
    // Somebody of this rank must now look again until there is room.
    if (first) doorbells_.poke(role_taken_ ? Sleeper::kWaiter : Sleeper::kBackground);
  }
  doorbells_.ring(0, interest::kRequest | (urgent ? interest::kUrgent : 0));
}

// A thread begins to wait: whatever was decided to be fused with this request, it is not worth waiting for more.
void Engine::want(Request& request) {
  if (request.wanted || request.status.load() != HVD_PENDING) return;
  // Under a standing order nobody waits for more; but whether it is worth having depends on who waits.
  if (request.order != 0) request.wanted = true;
  if (request.logged || request.order != 0) return;
  request.wanted = true;
  if (request.in_sequence) return want_in_sequence(request);
  if (!request.by_bit) {
    send(Want{request.key}, true);
    return;
  }
  Slot& slot = segment_->slot(request.id);
  const uint64_t members = members_here(request.key.set);
  // Another rank may already wait for the round after ours (the root of a broadcast runs ahead).
  uint64_t wanted = slot.wanted.load();
  while (wanted < request.round && !slot.wanted.compare_exchange_weak(wanted, request.round)) {
  }
  // If the round is not complete, whoever completes it sees `wanted`.
  if (slot.arrived.load() >= request.round * members) {
    segment_->coordinator().want_epoch.fetch_add(1);
    doorbells_.ring(0, interest::kUrgent);
  }
}

}  // namespace hvd
