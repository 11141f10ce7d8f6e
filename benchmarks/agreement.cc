// Simulates agreement on many ranks: how much the coordinator has to do for a step of many tensors.
//
//   agreement <ranks> <ranks of a host> <tensors> <steps>
//
// prints one line of JSON. Everything that speaks for a host is real: the coordinator, the delegates, their desks and
// segments, and the connections between them. Simulated is the rest: ranks, whose arrivals in the segment are made here
// as Engine::arrive makes them, and the clock. In a step every rank submits all tensors, one each 50 us, the ranks a
// little apart and each in its own order; then it waits for the last one. The first step, in which the names are
// compared, is told apart.
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/coordinator.h"
#include "engine/delegate.h"
#include "engine/hosts.h"
#include "engine/liveness.h"
#include "rank_group.h"
#include "transport/network.h"

namespace {

using namespace hvd;

constexpr Nanoseconds kTick = 50'000;
constexpr int kMostTicksApart = 8;
constexpr int kMostTicks = 1'000'000;  // of a step; it ends by itself long before

Nanoseconds clock_now = 1;
Nanoseconds simulated_now() { return clock_now; }

uint64_t cpu_now() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

// What looking at that clock costs, which is more than many a poll.
uint64_t cost_of_looking() {
  uint64_t least = ~uint64_t{0};
  for (int i = 0; i < 1000; ++i) {
    const uint64_t begin = cpu_now();
    least = std::min(least, cpu_now() - begin);
  }
  return least;
}

std::string name_of_tensor(size_t tensor) { return "allreduce.model.layers." + std::to_string(tensor) + ".weight"; }

// The rank that speaks for a host, with all that its engine has for it.
class Speaker {
 public:
  Speaker(const World& world, const std::vector<int>& controls, int cache_capacity) : world_(world) {
    settings_.now = simulated_now;
    settings_.stall_warning = 0;
    const int fd = Segment::create(world_.local_size, world_.size, cache_capacity, 1, 42, world_.local_size);
    segment_ = Segment::map(fd);
    close(fd);
    std::vector<int> bells(static_cast<size_t>(2 * world_.local_size));
    for (int& bell : bells) bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    doorbells_ = std::make_unique<Doorbells>(segment_, 0, bells.data(), counters_);
    for (const int bell : bells) close(bell);
    const std::vector<int> nobody(static_cast<size_t>(world_.size), -1);
    std::vector<Connected> connected(controls.size());
    for (size_t h = 0; h < controls.size(); ++h) connected[h].fd = controls[h];
    network_ = std::make_unique<Network>(std::vector<Connected>(nobody.size()), connected, world_.hosts,
                                         settings_.heartbeat_timeout, counters_);
    liveness_ = std::make_unique<Liveness>(world_, settings_, segment_, nobody.data(), *doorbells_, network_->fd());
    hosts_ = std::make_unique<Hosts>(world_, settings_, segment_, *doorbells_, *liveness_, *network_);
    if (world_.is_coordinator()) {
      coordinator_ = std::make_unique<Coordinator>(world_, settings_, segment_, *doorbells_, counters_, *hosts_,
                                                   [](int) { return false; });
    } else {
      delegate_ = std::make_unique<Delegate>(world_, settings_, segment_, *doorbells_, *hosts_);
    }
  }

  // Lets it do what there is to do. Time that finds nothing is not counted: an engine sleeps then.
  bool poll() {
    const uint64_t begin = cpu_now();
    bool moved = !network_->empty() && network_->poll();
    moved |= coordinator_ ? coordinator_->poll() : delegate_->poll();
    if (!network_->empty()) moved |= network_->poll();  // what was said goes out
    const uint64_t spent = cpu_now() - begin;
    if (moved && spent > looking_) cpu_ += spent - looking_;
    return moved;
  }

  Segment& segment() { return *segment_; }
  const Counters& counters() const { return counters_; }
  uint64_t cpu() const { return cpu_; }

 private:
  const World world_;
  Settings settings_;
  Counters counters_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Doorbells> doorbells_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Hosts> hosts_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Delegate> delegate_;
  const uint64_t looking_ = cost_of_looking();
  uint64_t cpu_ = 0;
};

// A rank, as far as agreement goes.
class SimulatedRank {
 public:
  SimulatedRank(Segment& segment, int local_rank, int number, size_t tensors)
      : segment_(segment),
        local_rank_(local_rank),
        requests_(segment.request_lines(local_rank).written, segment.request_bytes(local_rank),
                  Segment::kRequestRingBytes),
        log_(segment.log_lines().written, segment.rank(local_rank).log_read, segment.log_bytes(), Segment::kLogBytes),
        random_(static_cast<unsigned>(number)),
        order_(tensors),
        ids_(tensors, -1) {
    for (size_t i = 0; i < tensors; ++i) order_[i] = i;
  }

  void begin_step() {
    // Gradients come in the order of the model, with small differences between ranks.
    for (size_t i = 0; i + 1 < order_.size(); i += 2) {
      if (random_() % 4 == 0) std::swap(order_[i], order_[i + 1]);
    }
    submitted_ = done_ = 0;
    late_ = static_cast<int>(random_() % kMostTicksApart);
  }

  void tick() {
    if (late_-- > 0) return;
    if (submitted_ == order_.size()) return;
    const size_t tensor = order_[submitted_++];
    submit(tensor, submitted_ == order_.size());
  }

  // Reads the log. True when all tensors of the step were run.
  bool read() {
    while (log_.next([this](BytesView bytes) {
      const LogEntry entry = decode_log_entry(bytes);
      if (const auto* define = std::get_if<Define>(&entry)) {
        ids_[static_cast<size_t>(define->meta.shape[1])] = static_cast<int>(define->id);
      } else if (const auto* run = std::get_if<Run>(&entry)) {
        done_ += run->ids.size();
      }
    })) {
    }
    return done_ == order_.size();
  }

 private:
  void submit(size_t tensor, bool wanted) {
    if (ids_[tensor] >= 0) {
      arrive(ids_[tensor], wanted);
      return;
    }
    Submit request;
    request.key.name = name_of_tensor(tensor);
    request.meta.dtype = HVD_FLOAT32;
    request.meta.shape = {64, static_cast<int64_t>(tensor)};  // tells tensors apart when they are defined
    request.wanted = wanted;
    const Bytes bytes = encode(ToCoordinator{request});
    if (!requests_.write(bytes, segment_.request_lines(local_rank_).read.load())) {
      std::fprintf(stderr, "agreement: the ring of requests is full\n");
      std::exit(1);
    }
  }

  // As Engine::arrive; nobody sleeps here who would have to be woken.
  void arrive(int id, bool wanted) {
    Slot& slot = segment_.slot(id);
    const auto members = static_cast<uint64_t>(segment_.local_size());
    const uint64_t round = slot.arrived.load() / members + 1;
    if (wanted) slot.wanted.store(round);
    slot.present[local_rank_ / 64].fetch_xor(uint64_t{1} << (local_rank_ % 64));
    if ((slot.arrived.fetch_add(1) + 1) % members != 0) return;
    const uint64_t ticket = segment_.coordinator().ready_tail.fetch_add(1);
    ReadyCell& cell = segment_.ready_cell(ticket);
    cell.id = static_cast<uint64_t>(id);
    cell.sequence.store(ticket + 1);
  }

  Segment& segment_;
  const int local_rank_;
  RingWriter requests_;
  RingReader log_;
  std::mt19937 random_;
  std::vector<size_t> order_;
  std::vector<int> ids_;
  size_t submitted_ = 0, done_ = 0;
  int late_ = 0;
};

// What a step has cost.
struct Cost {
  uint64_t to_coordinator = 0, from_coordinator = 0, cpu = 0;
};

class Job {
 public:
  Job(int ranks, int of_a_host, size_t tensors) {
    std::vector<int> host_of(static_cast<size_t>(ranks));
    for (int r = 0; r < ranks; ++r) host_of[static_cast<size_t>(r)] = r / of_a_host;
    const int hosts = (ranks + of_a_host - 1) / of_a_host;
    std::vector<std::string> names;
    for (int h = 0; h < hosts; ++h) names.push_back("host" + std::to_string(h));
    std::vector<std::vector<int>> controls(static_cast<size_t>(hosts),
                                           std::vector<int>(static_cast<size_t>(hosts), -1));
    for (size_t h = 1; h < controls.size(); ++h) {
      std::tie(controls[0][h], controls[h][0]) = hvd::testing::tcp_pair();
    }
    const auto capacity = static_cast<int>(std::max<size_t>(1024, tensors));
    for (int h = 0; h < hosts; ++h) {
      World world = World::make(h * of_a_host, names, host_of, std::vector<int32_t>(host_of.size(), getpid()));
      world.process_sets = {std::vector<int>(host_of.size())};
      for (int r = 0; r < ranks; ++r) world.process_sets[0][static_cast<size_t>(r)] = r;
      speakers_.push_back(std::make_unique<Speaker>(world, controls[static_cast<size_t>(h)], capacity));
      for (const int fd : controls[static_cast<size_t>(h)]) {
        if (fd >= 0) close(fd);
      }
      for (int local = 0; local < world.local_size; ++local) {
        ranks_.emplace_back(speakers_.back()->segment(), local, h * of_a_host + local, tensors);
      }
    }
  }

  Cost step() {
    const Cost before = so_far();
    for (SimulatedRank& rank : ranks_) rank.begin_step();
    for (int tick = 0; tick < kMostTicks; ++tick) {
      clock_now += kTick;
      for (SimulatedRank& rank : ranks_) rank.tick();
      bool moved = true;
      while (moved) {
        moved = false;
        for (const auto& speaker : speakers_) moved |= speaker->poll();
        for (SimulatedRank& rank : ranks_) rank.read();  // makes room in the log
      }
      bool all = true;
      for (SimulatedRank& rank : ranks_) all &= rank.read();
      if (all) {
        const Cost now = so_far();
        return {now.to_coordinator - before.to_coordinator, now.from_coordinator - before.from_coordinator,
                now.cpu - before.cpu};
      }
    }
    std::fprintf(stderr, "agreement: a step did not end\n");
    std::exit(1);
  }

  size_t hosts() const { return speakers_.size(); }

 private:
  Cost so_far() const {
    Cost cost;
    for (size_t h = 1; h < speakers_.size(); ++h) cost.to_coordinator += speakers_[h]->counters().control_records.get();
    cost.from_coordinator = speakers_[0]->counters().control_records.get();
    cost.cpu = speakers_[0]->cpu();
    return cost;
  }

  std::vector<std::unique_ptr<Speaker>> speakers_;
  std::vector<SimulatedRank> ranks_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "Usage: agreement <ranks> <ranks of a host> <tensors> <steps>\n");
    return 2;
  }
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  const int ranks = std::atoi(argv[1]);
  Job job(ranks, std::atoi(argv[2]), static_cast<size_t>(std::atoi(argv[3])));
  const Cost first = job.step();
  job.step();  // learns how many tensors come
  std::vector<Cost> costs;
  for (int i = 0; i < std::atoi(argv[4]); ++i) costs.push_back(job.step());
  const auto median = [&costs](uint64_t Cost::*field) {
    std::sort(costs.begin(), costs.end(), [field](const Cost& a, const Cost& b) { return a.*field < b.*field; });
    return static_cast<unsigned long long>(costs[costs.size() / 2].*field);
  };
  std::printf(
      "{\"ranks\": %d, \"hosts\": %zu, \"first_messages\": %llu, \"first_cpu_ns\": %llu, \"messages_in\": %llu, "
      "\"messages_out\": %llu, \"cpu_ns\": %llu}\n",
      ranks, job.hosts(), static_cast<unsigned long long>(first.to_coordinator + first.from_coordinator),
      static_cast<unsigned long long>(first.cpu), median(&Cost::to_coordinator), median(&Cost::from_coordinator),
      median(&Cost::cpu));
}
