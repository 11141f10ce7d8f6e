// N ranks in one test: engines over real segments and sockets, as threads of this process or as forked processes.
#ifndef HOROVOD_TESTS_CPP_RANK_GROUP_H_
#define HOROVOD_TESTS_CPP_RANK_GROUP_H_

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "transport/tls.h"

namespace hvd::testing {

// The host of each rank.
struct HostOf {
  std::vector<int> ranks;
};

// Hosts with so many ranks each, one host's after the other's.
inline HostOf hosts_with(const std::vector<int>& counts) {
  HostOf host_of;
  for (size_t h = 0; h < counts.size(); ++h) {
    host_of.ranks.insert(host_of.ranks.end(), static_cast<size_t>(counts[h]), static_cast<int>(h));
  }
  return host_of;
}

// A pair of connected TCP sockets.
inline std::pair<int, int> tcp_pair() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const int one_end = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, generic, length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, generic, &length) != 0 || connect(one_end, generic, length) != 0) {
    throw SystemError("can't connect two sockets");
  }
  const int other_end = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  close(listener);
  const int on = 1;
  for (const int fd : {one_end, other_end}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return {one_end, other_end};
}

inline bool encryption_is_possible() {
  try {
    (void)tls::Libssl::load(tls::Libssl::kDefaultName);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Puts a TLS session over both ends, by the same key or by different ones. Throws Error.
inline void encrypt(Connected& one, Connected& other, const tls::Session::Key& key, const tls::Session::Key& others_key,
                    uint64_t records_per_key = tls::Session::kRecordsPerKey) {
  using tls::Session;
  const tls::Libssl& libssl = tls::Libssl::load(tls::Libssl::kDefaultName);
  for (const int fd : {one.fd, other.fd}) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  one.session = std::make_shared<Session>(libssl, Session::Role::kConnecting, key, records_per_key);
  other.session = std::make_shared<Session>(libssl, Session::Role::kListening, others_key, records_per_key);
  // Bytes over a loopback may take a moment.
  for (int i = 0; !(one.session->handshake(one.fd) & other.session->handshake(other.fd)); ++i) {
    if (i == 100'000) throw std::runtime_error("the handshake does not end");
    std::this_thread::yield();
  }
}
inline void encrypt(Connected& one, Connected& other) {
  tls::Session::Key key;
  key.fill(std::byte{7});
  encrypt(one, other, key, key);
}

// What the ranks of a group share. Each rank then makes its engine.
class RankGroup {
 public:
  // Ranks share memory within a host and are connected by TCP between hosts.
  // cores: how many the ranks of a host believe to have; the choice of algorithms depends on it.
  explicit RankGroup(HostOf host_of, std::vector<std::vector<int>> extra_sets = {}, int cache_capacity = 1024,
                     int cores = available_cores())
      : size_(static_cast<int>(host_of.ranks.size())), host_of_(std::move(host_of.ranks)) {
    sets_.emplace_back(static_cast<size_t>(size_));
    std::iota(sets_[0].begin(), sets_[0].end(), 0);
    for (auto& set : extra_sets) sets_.push_back(std::move(set));
    const char* const encrypted = std::getenv("HOROVOD_TEST_ENCRYPT");
    encrypted_ = encrypted != nullptr && *encrypted == '1' && encryption_is_possible();
    const int hosts = *std::max_element(host_of_.begin(), host_of_.end()) + 1;
    for (int h = 0; h < hosts; ++h) {
      const auto ranks = static_cast<int>(std::count(host_of_.begin(), host_of_.end(), h));
      const int fd = Segment::create(ranks, size_, cache_capacity, 1, 42, cores);
      hosts_.emplace_back();
      hosts_.back().segment = Segment::map(fd);
      close(fd);
      names_.push_back(hosts == 1 ? "test" : "test" + std::to_string(h));
      for (int local = 0; local < ranks; ++local) {
        hosts_.back().doorbells.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
        hosts_.back().doorbells.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
        hosts_.back().alive_fds.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      }
    }
    pids_.assign(static_cast<size_t>(size_), getpid());
    connect_all();
  }
  explicit RankGroup(const std::vector<int>& hosts, std::vector<std::vector<int>> extra_sets = {},
                     int cache_capacity = 1024, int cores = available_cores())
      : RankGroup(hosts_with(hosts), std::move(extra_sets), cache_capacity, cores) {}
  explicit RankGroup(int size, std::vector<std::vector<int>> extra_sets = {}, int cache_capacity = 1024,
                     int cores = available_cores())
      : RankGroup(std::vector<int>{size}, std::move(extra_sets), cache_capacity, cores) {}
  ~RankGroup() {
    for (const Host& host : hosts_) {
      for (const int fd : host.doorbells) close(fd);
      for (const int fd : host.alive_fds) close(fd);
    }
    close_all_connections();
  }
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // In a forked child that is to be this rank; pids are those of all ranks. The segments are not inherited, and what
  // belongs to other ranks must not be held open here.
  void become(int rank, const std::vector<int32_t>& pids) {
    pids_ = pids;
    for (Host& host : hosts_) {
      auto& inherited = *new std::shared_ptr<Segment>(std::move(host.segment));  // not to be unmapped: it is not there
      host.segment = Segment::map(inherited->fd());
    }
    for (int r = 0; r < size_; ++r) {
      const World world = make_world(r);
      int& alive = hosts_[static_cast<size_t>(world.host)].alive_fds[static_cast<size_t>(world.local_rank)];
      close(alive);
      alive = static_cast<int>(syscall(SYS_pidfd_open, pids_[static_cast<size_t>(r)], 0));
      if (r != rank) close_connections(r);
    }
  }
  void close_all_connections() {
    for (int r = 0; r < size_; ++r) close_connections(r);
  }

  World make_world(int rank) const {
    World world = World::make(rank, names_, host_of_, pids_);
    world.process_sets = sets_;
    return world;
  }

  // Takes the rank's ends of its connections along: then nobody but the engine holds them open.
  std::unique_ptr<Engine> make_engine(int rank, const Settings& settings = {}) const {
    const Host& host = hosts_[static_cast<size_t>(host_of_[static_cast<size_t>(rank)])];
    const std::vector<int> arena_fds(static_cast<size_t>(host.segment->local_size()), Arena::of_process().fd());
    Engine::Wiring wiring;
    wiring.segment = host.segment;
    wiring.alive_fds = host.alive_fds.data();
    wiring.doorbells = host.doorbells.data();
    wiring.arena_fds = arena_fds.data();
    wiring.links = links_[static_cast<size_t>(rank)];
    wiring.controls = controls_[static_cast<size_t>(rank)];
    auto engine = std::make_unique<Engine>(make_world(rank), settings, wiring);
    close_connections(rank);
    return engine;
  }

  // Makes a rank look dead to those of its host: its descriptor becomes readable, as a pidfd does.
  void declare_dead(int rank) const {
    const World world = make_world(rank);
    const uint64_t one = 1;
    (void)!write(hosts_[static_cast<size_t>(world.host)].alive_fds[static_cast<size_t>(world.local_rank)], &one,
                 sizeof one);
  }

  int size() const { return size_; }
  const std::vector<std::vector<int>>& sets() const { return sets_; }
  Segment& segment() const { return *hosts_[0].segment; }

 private:
  struct Host {
    std::shared_ptr<Segment> segment;
    std::vector<int> doorbells, alive_fds;
  };

  void connect_all() {
    const auto n = static_cast<size_t>(size_);
    links_.assign(n, std::vector<Connected>(n));
    controls_.assign(n, std::vector<Connected>(hosts_.size()));
    for (size_t a = 0; a < n; ++a) {
      for (size_t b = a + 1; b < n; ++b) {
        if (host_of_[a] != host_of_[b]) connect_both(links_[a][b], links_[b][a]);
      }
    }
    for (int h = 1; h < static_cast<int>(hosts_.size()); ++h) {
      const auto leader = static_cast<size_t>(std::find(host_of_.begin(), host_of_.end(), h) - host_of_.begin());
      connect_both(controls_[0][static_cast<size_t>(h)], controls_[leader][0]);
    }
  }

  void connect_both(Connected& one, Connected& other) const {
    std::tie(one.fd, other.fd) = tcp_pair();
    if (encrypted_) encrypt(one, other);
  }

  void close_connections(int rank) const {
    for (auto* list : {&links_[static_cast<size_t>(rank)], &controls_[static_cast<size_t>(rank)]}) {
      for (Connected& end : *list) {
        if (end.fd >= 0) close(std::exchange(end.fd, -1));
        end.session = nullptr;
      }
    }
  }

  const int size_;
  const std::vector<int> host_of_;
  std::vector<std::vector<int>> sets_;
  std::vector<Host> hosts_;
  std::vector<std::string> names_;
  std::vector<int32_t> pids_;
  bool encrypted_ = false;                                        // so HOROVOD_TEST_ENCRYPT=1 wants it
  mutable std::vector<std::vector<Connected>> links_, controls_;  // by rank
};

// One host, one rank a host, mixtures, and hosts whose ranks do not follow each other.
inline const std::vector<HostOf> kLayouts = {hosts_with({1}),
                                             hosts_with({2}),
                                             hosts_with({3}),
                                             hosts_with({5}),
                                             hosts_with({1, 1}),
                                             hosts_with({2, 2}),
                                             hosts_with({1, 1, 1}),
                                             hosts_with({1, 2, 3}),
                                             hosts_with({3, 1, 1, 1}),
                                             HostOf{{0, 1, 0, 1}},
                                             HostOf{{0, 2, 1, 1, 0, 2, 2}}};

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr hvd_dtype value = HVD_FLOAT32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr hvd_dtype value = HVD_INT64;
};

// A sum in place of the vector's elements.
template <typename T>
std::shared_ptr<Request> sum_request(const std::string& name, std::vector<T>& data, int set = 0) {
  auto request = std::make_shared<Request>();
  request->key = {set, name};
  request->meta.op = HVD_ALLREDUCE;
  request->meta.dtype = DTypeOf<T>::value;
  request->meta.reduce_op = HVD_SUM;
  request->meta.shape = {static_cast<int64_t>(data.size())};
  request->input = request->output = data.data();
  return request;
}

inline std::shared_ptr<Request> request_of(hvd_op op, const std::string& name, int set = 0) {
  auto request = std::make_shared<Request>();
  request->key = {set, name};
  request->meta.op = op;
  return request;
}

// An allgather or alltoall of rows of `width` floats.
inline std::shared_ptr<Request> rows_request(hvd_op op, const std::string& name, const std::vector<float>& data,
                                             int64_t width, std::vector<int64_t> splits = {}) {
  auto request = request_of(op, name);
  request->meta.dtype = HVD_FLOAT32;
  request->meta.shape = {kAnyRows, width};
  request->rows = static_cast<int64_t>(data.size()) / width;
  request->counts = std::move(splits);
  request->input = data.data();
  return request;
}

inline std::vector<float> result_of(const Request& request) {
  std::vector<float> values(static_cast<size_t>(request.result_shape[0] * request.result_shape[1]));
  if (!values.empty()) std::memcpy(values.data(), request.data.get(), values.size() * sizeof(float));
  return values;
}

inline constexpr int64_t kSecond = 1'000'000'000;
inline constexpr int64_t kPatience = 30 * kSecond;

// Runs a request that may as well be refused at once. Returns its status and puts the text into its error.
inline hvd_status try_to_run(Engine& engine, const std::shared_ptr<Request>& request) {
  try {
    return engine.run(request, kPatience);
  } catch (const Error& error) {
    request->error = error.what();
    return error.status;
  }
}

// Runs body(rank, engine) on a thread per rank.
template <typename Body>
void on_all_ranks(const RankGroup& group, const Settings& settings, Body body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < group.size(); ++r) {
    threads.emplace_back([&, r] {
      const auto engine = group.make_engine(r, settings);
      body(r, *engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hvd::testing
#endif  // HOROVOD_TESTS_CPP_RANK_GROUP_H_
