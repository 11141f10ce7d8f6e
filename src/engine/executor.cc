#include "engine/executor.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <utility>

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
    if (const int code = segment_->reserve_channel(set, world_.local_rank); code != 0) {
      throw SystemError("no memory for the buffers of process set " + std::to_string(set) + " (" +
                            std::to_string(Channel::kBytesPerRank) + " bytes)",
                        code);
    }
    auto channel = std::make_unique<Channel>(segment_, doorbells_, counters_, set, std::move(members), here, me);
    auto trays = std::make_unique<Trays>(segment_, *channel);
    lane.group = std::make_unique<Group>(world_, set, ranks, std::move(channel), std::move(trays), network_);
  }
  lanes_[static_cast<size_t>(set)] = std::move(lane);
}

Task Executor::start(const Job& job) {
  const Group& group = *lanes_[static_cast<size_t>(job.set)].group;
  const Batch& batch = job.batch;
  if (job.round.order != 0) {
    if (batch.op != HVD_ALLREDUCE) return run_by_letters(group, batch, job.round);
    if (!job.round.by_lane) return allreduce_by_letters(group, batch, job.round);
    return group.all_alone() ? allreduce_by_parts(group, batch, job.round)
                             : allreduce_by_chunks(group, batch, false, job.round);
  }
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
  lanes_[static_cast<size_t>(set)].queue.push_back(make_job(set, std::move(requests)));
}

void Executor::add_to_order(const OrderRound& round, std::shared_ptr<Request> request) {
  const int set = request->key.set;
  Requests one;
  one.push_back(std::move(request));
  std::unique_ptr<Job> job = make_job(set, std::move(one));
  job->round = round;
  job->round.begun_by_all = &job->begun_by_all;
  rounds_[round.order] = std::move(job);
}

std::shared_ptr<Request> Executor::withdraw(uint64_t order) {
  const auto round = rounds_.extract(order);
  return round.empty() ? nullptr : std::move(round.mapped()->requests.front());
}

std::unique_ptr<Executor::Job> Executor::make_job(int set, Requests requests) {
  const Lane& lane = lanes_[static_cast<size_t>(set)];
  auto job = std::make_unique<Job>();
  job->era = era_;
  job->set = set;
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
    if (!moves_rows(meta.op)) batch.add(request->input, request->output, request->bytes);
    if (moves_rows(meta.op) || meta.op == HVD_REDUCESCATTER) {
      batch.rows.push_back(
          {static_cast<const std::byte*>(request->input), request->meta.row_bytes(), request->counts,
           [request](const std::vector<int64_t>& received) { return make_result(*request, received); }});
    }
  }
  counters_.batches.add();
  counters_.tensors.add(requests.size());
  job->requests = std::move(requests);
  return job;
}

bool Executor::poll() {
  bool moved = !rounds_.empty() && advance_rounds();
  for (Lane& lane : lanes_) {
    if (!lane.queue.empty() && advance(lane)) moved = true;
  }
  return moved;
}

bool Executor::advance(Lane& lane) {
  std::exception_ptr error;
  const Step step = advance(*lane.queue.front(), error);
  if (step != Step::kEnded) return step == Step::kMoved;
  const std::unique_ptr<Job> ended = std::move(lane.queue.front());
  lane.queue.pop_front();
  ended->task = {};
  ended_(std::move(ended->requests), error);
  return true;
}

bool Executor::advance_rounds() {
  bool moved = false;
  std::vector<std::pair<std::unique_ptr<Job>, std::exception_ptr>> ended;
  for (auto round = rounds_.begin(); round != rounds_.end();) {
    std::exception_ptr error;
    const Step step = advance(*round->second, error);
    moved |= step != Step::kWaits;
    const auto next = std::next(round);
    if (step == Step::kEnded) ended.emplace_back(std::move(rounds_.extract(round).mapped()), error);
    round = next;
  }
  // Afterwards: who hears of an error may abandon all the others.
  for (auto& [job, error] : ended) {
    job->task = {};
    ended_(std::move(job->requests), error);
  }
  return moved;
}

// Takes a batch one step further, to its next wait, its next chunk or its end.
Executor::Step Executor::advance(Job& job, std::exception_ptr& error) {
  try {
    if (!job.started) {
      job.started = true;
      job.task = start(job);
    }
    // The order matters: once a peer is known to be gone, all that it ever published is visible to the look after.
    const int peer = job.task.wait().peer;
    const bool gone = peer >= 0 && is_gone_(peer);
    if (job.task.wait().satisfied()) {
      job.task.resume();
    } else if (gone) {
      job.task.give_up();
    } else {
      return Step::kWaits;
    }
    if (!job.task.done()) return Step::kMoved;
    error = job.task.error();
  } catch (...) {
    error = std::current_exception();
  }
  return Step::kEnded;
}

bool Executor::busy(int set) const {
  return !lanes_[static_cast<size_t>(set)].queue.empty() ||
         std::any_of(rounds_.begin(), rounds_.end(), [set](const auto& round) { return round.second->set == set; });
}

bool Executor::idle() const { return rounds_.empty() && only_rounds(); }

std::weak_ptr<const void> Executor::all_so_far() { return std::exchange(era_, new_era()); }

bool Executor::waits_for_letters(uint64_t order) const {
  const auto round = rounds_.find(order);
  return round != rounds_.end() && !round->second->begun_by_all;
}

bool Executor::only_waits_for_letters() const {
  return only_rounds() &&
         std::none_of(rounds_.begin(), rounds_.end(), [](const auto& round) { return round.second->begun_by_all; });
}

bool Executor::only_rounds() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.queue.empty(); });
}

const Wait* Executor::only_wait() const {
  if (rounds_.size() != 1 || !only_rounds()) return nullptr;
  const Job& job = *rounds_.begin()->second;
  return job.started && !job.round.by_lane ? &job.task.wait() : nullptr;
}

bool Executor::can_move(const Job& job) const {
  const Wait& wait = job.started ? job.task.wait() : Wait{};
  return wait.satisfied() || is_gone_(wait.peer);
}

bool Executor::can_move() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [this](const Lane& lane) { return !lane.queue.empty() && can_move(*lane.queue.front()); }) ||
         std::any_of(rounds_.begin(), rounds_.end(), [this](const auto& round) { return can_move(*round.second); });
}

uint64_t Executor::interests() const {
  uint64_t all = 0;
  const auto add = [&all](const Job& job) {
    if (job.started) all |= job.task.wait().interests;
  };
  for (const Lane& lane : lanes_) {
    if (!lane.queue.empty()) add(*lane.queue.front());
  }
  for (const auto& [order, job] : rounds_) add(*job);
  return all;
}

Executor::Requests Executor::abandon() {
  Requests all;
  for (auto& [order, job] : rounds_) all.push_back(std::move(job->requests.front()));
  rounds_.clear();
  for (Lane& lane : lanes_) {
    for (const auto& job : lane.queue) {
      for (auto& request : job->requests) all.push_back(std::move(request));
    }
    lane.queue.clear();
  }
  return all;
}

}  // namespace hvd
