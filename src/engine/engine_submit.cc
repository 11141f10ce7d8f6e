// Submission: from a request to an arrival in its name's slot, or to a message for the coordinator.
#include <algorithm>
#include <cmath>
#include <limits>

#include "collectives/batch.h"
#include "engine/engine.h"
#include "engine/mismatch.h"
#include "kernels/kernels.h"

namespace hvd {

void Engine::submit(const std::shared_ptr<Request>& request, bool will_wait) {
  validate(*request);
  const std::lock_guard lock(mutex_);
  request->wanted = will_wait;
  submit_locked(request);
}

// What is wrong with a request on its own, on this rank.
void Engine::validate(const Request& request) const {
  const Meta& meta = request.meta;
  const std::string what = std::string(name_of(meta.op)) + " of tensor '" + request.key.name + "'";
  const int set = request.key.set;
  if (set < 0 || static_cast<size_t>(set) >= world_.process_sets.size()) {
    throw InvalidError(what + ": there is no process set with id " + std::to_string(set) + "; this job has ids 0 to " +
                       std::to_string(world_.process_sets.size() - 1) + ".");
  }
  const std::vector<int>& ranks = world_.process_sets[static_cast<size_t>(set)];
  if (!std::binary_search(ranks.begin(), ranks.end(), world_.rank)) {
    throw InvalidError(what + ": rank " + std::to_string(world_.rank) + " is not a member of process set " +
                       std::to_string(set) + " (" + ranks_text(ranks) + ").");
  }
  if (request.key.name.empty() || request.key.name.size() > HVD_MAX_NAME) {
    throw InvalidError(std::string(name_of(meta.op)) + ": a tensor's name has 1 to " + std::to_string(HVD_MAX_NAME) +
                       " bytes, not " + std::to_string(request.key.name.size()) + ".");
  }
  if (meta.op == HVD_BARRIER) return;
  if (meta.op != HVD_ALLREDUCE && meta.op != HVD_BROADCAST) {
    throw InvalidError(what + ": this version has no " + name_of(meta.op) + ".");
  }
  if (meta.shape.size() > HVD_MAX_DIMS) {
    throw InvalidError(what + ": " + std::to_string(meta.shape.size()) + " dimensions; at most " +
                       std::to_string(HVD_MAX_DIMS) + " are supported.");
  }
  uint64_t elements = 1;
  for (const int64_t extent : meta.shape) {
    if (extent < 0) throw InvalidError(what + ": negative extent in shape " + shape_text(meta.shape) + ".");
    if (extent != 0 && elements > (uint64_t{1} << 56) / static_cast<uint64_t>(extent)) {
      throw InvalidError(what + ": shape " + shape_text(meta.shape) + " is too large.");
    }
    elements *= static_cast<uint64_t>(extent);
  }
  if (elements > 0 && (request.input == nullptr || request.output == nullptr)) {
    throw InvalidError(what + ": the tensor has " + std::to_string(elements) + " elements but no memory.");
  }
  if (meta.op == HVD_BROADCAST) {
    if (!std::binary_search(ranks.begin(), ranks.end(), meta.root)) {
      throw InvalidError("broadcast received invalid root rank " + std::to_string(meta.root) + " for tensor '" +
                         request.key.name + "': process set " + std::to_string(set) + " has " + ranks_text(ranks) +
                         ".");
    }
    return;
  }
  if (kernels().fold[meta.dtype][meta.reduce_op] == nullptr) {
    throw InvalidError(what + ": reduction " + name_of(meta.reduce_op) + " is not supported for " +
                       name_of(meta.dtype) + ".");
  }
  if ((meta.prescale != 1.0 || meta.postscale != 1.0) && kernels().scale_copy[meta.dtype] == nullptr) {
    throw InvalidError(what + ": prescale_factor and postscale_factor are not supported for " +
                       std::string(name_of(meta.dtype)) + ".");
  }
  if (std::isnan(meta.prescale) || std::isnan(meta.postscale)) {
    throw InvalidError(what + ": prescale_factor or postscale_factor is not a number.");
  }
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
  counters_.requests_submitted.add();
  const bool cached = entry.id >= 0 && entry.id < segment_->cache_capacity();
  if (cached && ids_[static_cast<size_t>(entry.id)].meta == request->meta) {
    request->id = entry.id;
    arrive(*request);
  } else {
    send(Submit{request->key, request->meta, request->wanted}, request->wanted);
  }
}

// Joins the current round of the name's slot: see engine/coordinator.h.
void Engine::arrive(Request& request) {
  Slot& slot = segment_->slot(request.id);
  const uint64_t members = world_.process_sets[static_cast<size_t>(request.key.set)].size();
  const int me = world_.local_rank;
  counters_.requests_by_bit.add();
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
    doorbells_.ring(world_.local_of(0), interest::kUrgent);
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
  doorbells_.ring(world_.local_of(0), interest::kRequest | (urgent ? interest::kUrgent : 0));
}

// A thread begins to wait: whatever was decided to be fused with this request, it is not worth waiting for more.
void Engine::want(Request& request) {
  if (request.wanted || request.logged || request.status.load() != HVD_PENDING) return;
  request.wanted = true;
  if (!request.by_bit) {
    send(Want{request.key}, true);
    return;
  }
  Slot& slot = segment_->slot(request.id);
  const uint64_t members = world_.process_sets[static_cast<size_t>(request.key.set)].size();
  // Another rank may already wait for the round after ours (the root of a broadcast runs ahead).
  uint64_t wanted = slot.wanted.load();
  while (wanted < request.round && !slot.wanted.compare_exchange_weak(wanted, request.round)) {
  }
  // If the round is not complete, whoever completes it sees `wanted`.
  if (slot.arrived.load() >= request.round * members) {
    segment_->coordinator().want_epoch.fetch_add(1);
    doorbells_.ring(world_.local_of(0), interest::kUrgent);
  }
}

}  // namespace hvd
