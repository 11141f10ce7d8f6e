// The limit between two hosts: a plain socket program that sends and receives at the same time.
//
//   wire_limit <network of host 0> <network of host 1> <address of host 0>
//
// forks into two processes, which enter these network namespaces (/proc/<pid>/ns/net), connect to each other and read
// commands from the first one's standard input, one a line,
//
//   allreduce <bytes> <buffers>    prepares: each has so many buffers
//   run <iterations> <pause>       runs them, with so many microseconds before each, and prints the nanoseconds of
//                                  each, on one line
//
// An iteration: each sends a buffer of its own to the other, which receives it, both directions at once. Nothing is
// added up: what an allreduce of two hosts must move at least, and no more. The time runs from the moment when the last
// process begins until the last one has ended. Buffers rotate and are rewritten between iterations, outside of that
// time. They begin with a page: where malloc puts them, 16 bytes behind that, some processors take several times as
// long to copy from the kernel's pages (src/transport/aligned.h), and this is to be the limit.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>

namespace {

constexpr int kHosts = 2;
constexpr int kSpins = 20000;  // before a core is given away that should be ours
constexpr int kMostIterations = 1 << 16;
constexpr uint16_t kPort = 7070;
constexpr size_t kStep = size_t{256} << 10;  // bytes of one system call: both directions take turns
constexpr int64_t kSpinNanoseconds = 50'000;

struct alignas(128) Flag {
  std::atomic<uint64_t> value{0};
};

struct Control {
  Flag command[kHosts], gate[kHosts];
  uint64_t bytes, buffers, iterations, pause;
  int64_t starts[kHosts][kMostIterations], ends[kHosts][kMostIterations];
};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int connect_hosts(int host, const char* address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(kPort);
  if (fd < 0 || inet_pton(AF_INET, address, &where.sin_addr) != 1) fail("wire_limit: no address");
  const auto* const name = reinterpret_cast<const sockaddr*>(&where);
  int connection = fd;
  if (host == 0) {
    const int on = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, name, sizeof where) != 0 || listen(fd, 1) != 0) fail("wire_limit: can't listen");
    connection = accept(fd, nullptr, nullptr);
    if (connection < 0) fail("wire_limit: nobody called");
    close(fd);
  } else {
    for (int attempts = 0; connect(fd, name, sizeof where) != 0; ++attempts) {
      if (attempts == 1000) fail("wire_limit: nobody listens");
      usleep(10000);
    }
  }
  const int on = 1;
  (void)setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (fcntl(connection, F_SETFL, O_NONBLOCK) != 0) fail("wire_limit: no connection");
  return connection;
}

class Host {
 public:
  Host(Control& control, int host, int connection) : control_(control), host_(host), connection_(connection) {}

  void prepare() {
    own_.reset();
    theirs_.reset();
    own_ = filled_with(static_cast<char>(host_ + 1));
    theirs_ = filled_with(0);
  }

  void run() {
    for (uint64_t i = 0; i < control_.iterations; ++i) {
      const size_t at = turn_++ % control_.buffers * control_.bytes;
      if (control_.pause > 0) usleep(static_cast<useconds_t>(control_.pause));
      meet(control_.gate);
      control_.starts[host_][i] = now();
      exchange(own_.get() + at, theirs_.get() + at);
      control_.ends[host_][i] = now();
      meet(control_.gate);
      rewrite(at);
    }
    meet(control_.gate);
  }

  void report(bool times) const {
    for (uint64_t i = 0; times && i < control_.iterations; ++i) {
      const int64_t start = std::max(control_.starts[0][i], control_.starts[1][i]);
      const int64_t end = std::max(control_.ends[0][i], control_.ends[1][i]);
      std::printf("%lld ", static_cast<long long>(end - start));
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  void meet(Flag* flags) {
    const uint64_t turn = flags[host_].value.load(std::memory_order_relaxed) + 1;
    flags[host_].value.store(turn, std::memory_order_release);
    for (int looks = 0; flags[1 - host_].value.load(std::memory_order_acquire) < turn; ++looks) {
      if (looks > kSpins) sched_yield();
    }
  }

 private:
  // One thread. It looks again for a while before it sleeps.
  void exchange(const char* out, char* in) {
    size_t to_send = control_.bytes, to_come = control_.bytes;
    int64_t idle_since = 0;
    while (to_send > 0 || to_come > 0) {
      const size_t sent = moved(to_send == 0 ? 0 : send(connection_, out, std::min(to_send, kStep), MSG_NOSIGNAL));
      const size_t came = moved(to_come == 0 ? 0 : recv(connection_, in, std::min(to_come, kStep), 0));
      out += sent;
      to_send -= sent;
      in += came;
      to_come -= came;
      if (sent > 0 || came > 0) {
        idle_since = 0;
        continue;
      }
      const int64_t time = now();
      if (idle_since == 0) idle_since = time;
      if (time - idle_since < kSpinNanoseconds) continue;
      pollfd wanted{connection_, static_cast<short>((to_send > 0 ? POLLOUT : 0) | (to_come > 0 ? POLLIN : 0)), 0};
      (void)poll(&wanted, 1, -1);
    }
  }

  static size_t moved(ssize_t n) {
    if (n >= 0) return static_cast<size_t>(n);
    if (errno != EAGAIN && errno != EINTR) fail("wire_limit: the connection is lost");
    return 0;
  }

  void rewrite(size_t at) {
    const auto expected = static_cast<char>(2 - host_);
    if (theirs_[at] != expected || theirs_[at + control_.bytes - 1] != expected) {
      std::fprintf(stderr, "wire_limit: %d came, expected %d\n", theirs_[at], expected);
      std::exit(1);
    }
    std::fill_n(own_.get() + at, control_.bytes, static_cast<char>(host_ + 1));
    std::fill_n(theirs_.get() + at, control_.bytes, 0);
  }

  static constexpr std::align_val_t kPage{4096};
  struct Delete {
    void operator()(char* memory) const { ::operator delete[](memory, kPage); }
  };
  using Buffers = std::unique_ptr<char[], Delete>;
  Buffers filled_with(char value) const {
    const size_t bytes = control_.bytes * control_.buffers;
    Buffers buffers(static_cast<char*>(::operator new[](bytes, kPage)));
    std::fill_n(buffers.get(), bytes, value);
    return buffers;
  }

  Control& control_;
  const int host_, connection_;
  size_t turn_ = 0;
  Buffers own_, theirs_;
};

// Host 0 alone reads commands; the other one sleeps until it has written one into the control block.
void serve(Control& control, Host& host, int number, int commands) {
  char line[128];
  while (true) {
    if (number == 0) {
      unsigned long long first = 0, second = 0;
      if (std::fgets(line, sizeof line, stdin) == nullptr) return;
      if (std::sscanf(line, "allreduce %llu %llu", &first, &second) == 2) {
        control.bytes = first;
        control.buffers = second;
        control.iterations = 0;
      } else if (std::sscanf(line, "run %llu %llu", &first, &second) == 2) {
        control.iterations = std::min<uint64_t>(first, kMostIterations);
        control.pause = second;
      } else {
        std::fprintf(stderr, "wire_limit: unknown command: %s", line);
        std::exit(2);
      }
      (void)!write(commands, "c", 1);
    } else {
      char byte = 0;
      if (read(commands, &byte, 1) != 1) return;
    }
    host.meet(control.command);
    const bool is_run = control.iterations > 0;
    is_run ? host.run() : host.prepare();
    host.meet(control.command);
    if (number == 0) host.report(is_run);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "Usage: wire_limit <network of host 0> <network of host 1> <address of host 0>\n");
    return 2;
  }
  void* const memory = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("wire_limit: no shared memory");
  auto& control = *new (memory) Control;
  int ends[2];
  if (pipe(ends) != 0) fail("wire_limit: no pipe");
  const pid_t child = fork();
  if (child < 0) fail("wire_limit: no process");
  const int number = child == 0 ? 1 : 0;
  if (number == 1) prctl(PR_SET_PDEATHSIG, SIGKILL);
  close(ends[number]);
  const int network = open(argv[1 + number], O_RDONLY | O_CLOEXEC);
  if (network < 0 || setns(network, CLONE_NEWNET) != 0) fail("wire_limit: can't enter the network of a host");
  Host host(control, number, connect_hosts(number, argv[3]));
  serve(control, host, number, ends[1 - number]);
  close(ends[1 - number]);
  if (number == 0) wait(nullptr);
}
