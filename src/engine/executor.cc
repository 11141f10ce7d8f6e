#include "engine/executor.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>

#include "collectives/collectives.h"

namespace hvd {
namespace {

// Everybody was there when the coordinator logged it, so there is nothing left to wait for.
Task barrier() { co_return; }

// The result of an allgather or alltoall, once it is known how many rows come from each member.
std::byte* make_result(Request& request, const std::vector<int64_t>& received) {
  request.received = received;
  request.result_shape = request.meta.shape;
  request.result_shape[0] = std::accumulate(received.begin(), received.end(), int64_t{0});
  const uint64_t bytes = static_cast<uint64_t>(request.result_shape[0]) * request.meta.row_bytes();
  void* memory = nullptr;
  if (request.allocate != nullptr) {
    memory = request.allocate(request.context, static_cast<int32_t>(request.result_shape.size()),
                              request.result_shape.data());
  } else {
    memory = allocate_result(bytes);
    request.data.reset(memory);
  }
  if (memory == nullptr) {
    throw Error(HVD_SYSTEM, "no memory for the result of " + std::string(name_of(request.meta.op)) + " of tensor '" +
                                request.key.name + "': " + std::to_string(bytes) + " bytes");
  }
  return static_cast<std::byte*>(memory);
}

}  // namespace

Executor::Executor(const World& world, const Settings& settings, const std::shared_ptr<Segment>& segment,
                   Doorbells& doorbells, Counters& counters, PeerArenas& arenas, Network& network, IsGone is_gone,
                   Ended ended)
    : world_(world),
      settings_(settings),
      segment_(segment),
      doorbells_(doorbells),
      counters_(counters),
      arenas_(arenas),
      network_(network),
      is_gone_(std::move(is_gone)),
      ended_(std::move(ended)) {
  for (size_t set = 0; set < world_.process_sets.size(); ++set) {
    add_set(static_cast<int>(set), world_.process_sets[set]);
  }
}

void Executor::add_set(int set, const std::vector<int>& ranks) {
  if (static_cast<size_t>(set) >= lanes_.size()) lanes_.resize(static_cast<size_t>(set) + 1);
  Lane lane;
  lane.ranks = ranks;
  if (std::find(ranks.begin(), ranks.end(), world_.rank) != ranks.end()) {
    std::vector<int> here, members;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(here),
                 [this](int rank) { return world_.is_local(rank); });
    for (const int rank : here) members.push_back(world_.local(rank));
    const auto me = static_cast<int>(std::find(here.begin(), here.end(), world_.rank) - here.begin());
    segment_->reserve_channel(set, world_.local_rank);
    auto channel = std::make_unique<Channel>(segment_, doorbells_, counters_, set, std::move(members), here, me);
    lane.group = std::make_unique<Group>(world_, set, ranks, std::move(channel), network_);
  }
  lanes_[static_cast<size_t>(set)] = std::move(lane);
}

Task Executor::start(const Group& group, const Batch& batch) {
  Channel& channel = group.channel();
  const bool one_host = group.hosts() == 1;
  switch (batch.op) {
    case HVD_ALLREDUCE:
      if (batch.reduce_op == HVD_ADASUM) return adasum(group, batch);
      return one_host ? allreduce(channel, batch, arenas_)
                      : allreduce_between_hosts(group, batch, settings_.allreduce_ring);
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
      return move_rows(group, batch);
    case HVD_BROADCAST:
      return one_host ? broadcast(channel, batch) : broadcast_between_hosts(group, batch);
    case HVD_REDUCESCATTER:
      return one_host ? reducescatter(channel, batch) : reducescatter_between_hosts(group, batch);
    case HVD_BARRIER:
      return barrier();
    default:
      throw Error(HVD_SYSTEM, std::string("the log asks to run ") + name_of(batch.op));
  }
}

void Executor::add(int set, Requests requests) {
  Lane& lane = lanes_[static_cast<size_t>(set)];
  auto job = std::make_unique<Job>();
  const Meta& meta = requests.front()->meta;
  Batch& batch = job->batch;
  batch.op = meta.op;
  batch.dtype = meta.dtype;
  batch.reduce_op = meta.reduce_op;
  batch.prescale = meta.prescale;
  batch.postscale = meta.postscale;
  if (meta.op == HVD_BROADCAST) {
    batch.root = static_cast<int>(std::find(lane.ranks.begin(), lane.ranks.end(), meta.root) - lane.ranks.begin());
  }
  for (const auto& request : requests) {
    if (!moves_rows(meta.op)) batch.add(request->input, request->output, request->meta.bytes());
    if (moves_rows(meta.op) || meta.op == HVD_REDUCESCATTER) {
      batch.rows.push_back(
          {static_cast<const std::byte*>(request->input), request->meta.row_bytes(), request->counts,
           [request](const std::vector<int64_t>& received) { return make_result(*request, received); }});
    }
  }
  counters_.batches.add();
  counters_.tensors.add(requests.size());
  job->requests = std::move(requests);
  lane.queue.push_back(std::move(job));
}

bool Executor::poll() {
  bool moved = false;
  for (Lane& lane : lanes_) {
    if (!lane.queue.empty() && advance(lane)) moved = true;
  }
  return moved;
}

// Takes the lane's first batch one step further, to its next wait, its next chunk or its end. False if it must wait.
bool Executor::advance(Lane& lane) {
  Job& job = *lane.queue.front();
  std::exception_ptr error;
  try {
    if (!job.started) {
      job.started = true;
      job.task = start(*lane.group, job.batch);
    }
    // The order matters: once a peer is known to be gone, all that it ever published is visible to the look after.
    const int peer = job.task.wait().peer;
    const bool gone = peer >= 0 && is_gone_(peer);
    if (job.task.wait().satisfied()) {
      job.task.resume();
    } else if (gone) {
      job.task.give_up();
    } else {
      return false;
    }
    if (!job.task.done()) return true;
    error = job.task.error();
  } catch (...) {
    error = std::current_exception();
  }
  const std::unique_ptr<Job> ended = std::move(lane.queue.front());
  lane.queue.pop_front();
  ended->task = {};
  ended_(std::move(ended->requests), error);
  return true;
}

bool Executor::idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.queue.empty(); });
}

bool Executor::can_move() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [this](const Lane& lane) {
    if (lane.queue.empty()) return false;
    const Job& job = *lane.queue.front();
    const Wait& wait = job.started ? job.task.wait() : Wait{};
    return wait.satisfied() || is_gone_(wait.peer);
  });
}

uint64_t Executor::interests() const {
  uint64_t all = 0;
  for (const Lane& lane : lanes_) {
    if (!lane.queue.empty() && lane.queue.front()->started) all |= lane.queue.front()->task.wait().interests;
  }
  return all;
}

Executor::Requests Executor::abandon() {
  Requests all;
  for (Lane& lane : lanes_) {
    for (const auto& job : lane.queue) {
      for (auto& request : job->requests) all.push_back(std::move(request));
    }
    lane.queue.clear();
  }
  return all;
}

}  // namespace hvd
