// The C interface: one engine per process, handles, and the end of all exceptions.
#include "api/horovod.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "api/guarded.h"
#include "api/tls.h"
#include "engine/engine.h"
#include "engine/logging.h"
#include "transport/arena.h"
#include "transport/errors.h"

thread_local std::string hvd::api::last_error;
std::atomic<bool> hvd::api::forked{false};

namespace {

using hvd::Engine;
using hvd::Error;
using hvd::InvalidError;
using hvd::Meta;
using hvd::Request;
using hvd::api::failed;
using hvd::api::forked;
using hvd::api::guarded;
using hvd::api::last_error;

// What lives as long as the process is never destroyed: at exit other threads, or the child of a fork, may still use
// it.
std::mutex& engine_mutex = *new std::mutex;  // guards engine
std::shared_ptr<Engine>& engine = *new std::shared_ptr<Engine>;
std::mutex& life_cycle_mutex = *new std::mutex;  // one init or shutdown at a time

std::mutex& handles_mutex = *new std::mutex;  // guards handles
auto& handles = *new std::unordered_map<hvd_handle, std::shared_ptr<Request>>;
std::atomic<hvd_handle> next_handle{1};

// Fork. A child must neither use nor disturb its parent's engine: it closes the descriptors, the segment is not mapped
// in it (MADV_DONTFORK), and every call is refused (`forked`). The child's handler may only do what is safe in a signal
// handler, so what it closes is prepared here.
std::atomic<const std::vector<int>*> descriptors{nullptr};  // none: there is no engine

void in_forked_child() {
  const std::vector<int>* const inherited = descriptors.exchange(nullptr);
  if (inherited == nullptr) return;
  forked = true;
  for (const int fd : *inherited) close(fd);
}

void forget_descriptors() { delete descriptors.exchange(nullptr); }

void remember_descriptors(const std::vector<int>& fds) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, in_forked_child); });
  forget_descriptors();
  descriptors = new std::vector<int>(fds);
}

std::shared_ptr<Engine> current_engine() {
  const std::lock_guard lock(engine_mutex);
  return engine;
}

std::shared_ptr<Engine> running_engine() {
  std::shared_ptr<Engine> running = current_engine();
  if (!running) throw Error(HVD_NOT_INITIALIZED, "Horovod has not been initialized; use hvd.init().");
  return running;
}

std::shared_ptr<Request> make_request(const hvd_request& from) {
  if (from.struct_size != sizeof(hvd_request)) throw InvalidError("hvd_request: unknown size of the structure");
  if (from.name == nullptr || from.ndim < 0 || (from.ndim > 0 && from.shape == nullptr)) {
    throw InvalidError("hvd_request: name or shape is missing");
  }
  if (from.n_splits < 0 || (from.n_splits > 0 && from.splits == nullptr)) {
    throw InvalidError("hvd_request: splits are missing");
  }
  if (from.op < HVD_ALLREDUCE || from.op > HVD_REMOVE_PROCESS_SET || from.dtype < HVD_UINT8 ||
      from.dtype >= HVD_DTYPES || from.reduce_op < HVD_AVERAGE || from.reduce_op > HVD_PRODUCT) {
    throw InvalidError("hvd_request: unknown operation, data type or reduction");
  }
  auto request = std::make_shared<Request>();
  request->key.set = from.process_set;
  request->key.name.assign(from.name, from.name_length);
  Meta& meta = request->meta;
  meta.op = from.op;
  const bool reduces = from.op == HVD_ALLREDUCE || from.op == HVD_REDUCESCATTER;
  const bool has_tensor = reduces || hvd::moves_rows(from.op) || from.op == HVD_BROADCAST;
  if (has_tensor) {
    meta.dtype = from.dtype;
    meta.shape.assign(from.shape, from.shape + from.ndim);
  }
  if (reduces) {
    meta.reduce_op = from.reduce_op;
    meta.prescale = from.prescale;
    meta.postscale = from.postscale;
  }
  if (from.op == HVD_BROADCAST || from.op == HVD_REMOVE_PROCESS_SET) meta.root = from.root;
  if (from.op == HVD_ADD_PROCESS_SET) meta.shape.assign(from.splits, from.splits + from.n_splits);
  if (from.op == HVD_ALLTOALL) request->counts.assign(from.splits, from.splits + from.n_splits);
  if (hvd::moves_rows(from.op) && from.ndim > 0) request->rows = std::exchange(meta.shape[0], hvd::kAnyRows);
  request->allocate = from.allocate;
  // These are one at a time, whatever the caller names them.
  if (from.op == HVD_JOIN) request->key = {0, hvd::kJoinName};
  if (from.op == HVD_ADD_PROCESS_SET || from.op == HVD_REMOVE_PROCESS_SET) request->key = {0, hvd::kChangeSetsName};
  request->input = from.input;
  request->output = from.output;
  request->callback = from.callback;
  request->context = from.context;
  return request;
}

// Whether there is something for hvd_take_result.
bool has_result(const Request& request) {
  const hvd_op op = request.meta.op;
  return hvd::moves_rows(op) || op == HVD_JOIN || op == HVD_ADD_PROCESS_SET;
}

hvd_handle keep(const std::shared_ptr<Request>& request) {
  const hvd_handle handle = next_handle.fetch_add(1);
  const std::lock_guard lock(handles_mutex);
  handles.emplace(handle, request);
  return handle;
}

void forget(hvd_handle handle) {
  const std::lock_guard lock(handles_mutex);
  handles.erase(handle);
}

std::shared_ptr<Request> find(hvd_handle handle) {
  const std::lock_guard lock(handles_mutex);
  const auto found = handles.find(handle);
  if (found == handles.end()) {
    throw InvalidError("Handle " + std::to_string(handle) + " was not created or has been cleared.");
  }
  return found->second;
}

hvd_status outcome(const Request& request) {
  const hvd_status status = request.status.load();
  return status == HVD_OK || status == HVD_PENDING ? status : failed(status, request.error);
}

int64_t to_ns(int64_t timeout_ms) {
  constexpr int64_t kLongest = int64_t{365} * 24 * 3600 * 1000;  // beyond any patience, and far from overflow
  return timeout_ms < 0 ? -1 : std::min(timeout_ms, kLongest) * 1'000'000;
}

std::vector<hvd::Connected> connected(const int* fds, hvd_tls* const* sessions, int32_t count) {
  std::vector<hvd::Connected> all;
  for (int32_t i = 0; i < count; ++i) {
    hvd_tls* const session = sessions != nullptr && fds[i] >= 0 ? sessions[i] : nullptr;
    if (session != nullptr && !session->session) throw InvalidError("hvd_tls: the engine has the session already");
    all.push_back({fds[i], session != nullptr ? std::move(session->session) : nullptr});
  }
  return all;
}

hvd::World world_of(const hvd_config& config) {
  if (config.size < 1 || config.n_hosts < 1) throw InvalidError("hvd_config: no ranks, or no hosts");
  const auto size = static_cast<size_t>(config.size);
  hvd::World world = hvd::World::make(config.rank, {config.hosts, config.hosts + config.n_hosts},
                                      {config.host_of, config.host_of + size}, {config.pids, config.pids + size});
  if (world.local_rank != config.local_rank || world.local_size != config.local_size) {
    throw InvalidError("rank " + std::to_string(config.rank) + " is local rank " + std::to_string(config.local_rank) +
                       " of " + std::to_string(config.local_size) + ", but in the order of ranks it is number " +
                       std::to_string(world.local_rank) + " of " + std::to_string(world.local_size) + " on its host");
  }
  if (world.host_of[0] != 0) throw InvalidError("rank 0 must be on the first host");
  // A rank without its connections would wait for ever.
  for (int r = 0; r < world.size; ++r) {
    if ((config.links[r] >= 0) == world.is_local(r)) {
      throw InvalidError("expected a connection with every rank of another host, not with rank " + std::to_string(r));
    }
  }
  for (int h = 0; h < world.n_hosts(); ++h) {
    const bool needed = world.is_leader() && (world.is_coordinator() ? h != world.host : h == 0 && world.host != 0);
    if ((config.controls[h] >= 0) != needed) {
      throw InvalidError("expected control connections between local rank 0 of every host and rank 0 alone, see host " +
                         std::to_string(h));
    }
  }
  const int32_t* next = config.process_set_ranks;
  for (int32_t s = 0; s < config.n_process_sets; ++s) {
    std::vector<int> ranks(next, next + config.process_set_sizes[s]);
    next += config.process_set_sizes[s];
    const bool ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
    if (ranks.empty() || !ascending || ranks.front() < 0 || ranks.back() >= world.size) {
      throw InvalidError("process set " + std::to_string(s + 1) + ": ranks must be ascending, from 0 to " +
                         std::to_string(world.size - 1));
    }
    world.process_sets.push_back(std::move(ranks));
  }
  if (world.process_sets.size() > static_cast<size_t>(hvd::Segment::kMaxSets)) {
    throw InvalidError("at most " + std::to_string(hvd::Segment::kMaxSets - 1) + " process sets are supported");
  }
  return world;
}

}  // namespace

const char* hvd_last_error(void) { return last_error.c_str(); }
const char* hvd_version(void) { return HOROVOD_VERSION; }

hvd_status hvd_segment_create(int32_t local_size, int32_t size, int32_t cache_capacity, uint64_t generation,
                              uint64_t nonce, int* fd) {
  return guarded([&] {
    *fd = hvd::Segment::create(local_size, size, cache_capacity, generation, nonce);
    return HVD_OK;
  });
}

hvd_status hvd_segment_probe(int fd, uint64_t* generation, uint64_t* nonce) {
  return guarded([&] {
    const auto segment = hvd::Segment::map(fd);
    *generation = segment->generation();
    *nonce = segment->nonce();
    return HVD_OK;
  });
}

hvd_status hvd_init(const hvd_config* config) {
  return guarded([&] {
    const std::lock_guard life_cycle(life_cycle_mutex);
    if (config->struct_size != sizeof(hvd_config)) throw InvalidError("hvd_config: unknown size of the structure");
    if (!(config->heartbeat_timeout > 0)) throw InvalidError("hvd_config: the heartbeat timeout must be positive");
    if (current_engine()) throw InvalidError("Horovod is already initialized");
    hvd::World world = world_of(*config);
    hvd::Settings settings;
    settings.fusion_threshold = config->fusion_threshold;
    settings.heartbeat_timeout = config->heartbeat_timeout;
    settings.stall_warning = config->stall_warning;
    settings.stall_shutdown = config->stall_shutdown;
    settings.allreduce_ring = config->allreduce_ring != 0;
    hvd::configure_logging(static_cast<hvd::LogLevel>(config->log_level), config->log_hide_time != 0, config->rank);
    Engine::Wiring wiring;
    wiring.segment = hvd::Segment::map(config->segment_fd);
    wiring.alive_fds = config->alive_fds;
    wiring.doorbells = config->doorbells;
    wiring.arena_fds = config->arena_fds;
    wiring.links = connected(config->links, config->link_sessions, config->size);
    wiring.controls = connected(config->controls, config->control_sessions, config->n_hosts);
    if (wiring.segment->local_size() != config->local_size || wiring.segment->size() != config->size ||
        wiring.segment->cache_capacity() != config->cache_capacity) {
      throw InvalidError("the segment was made for other settings");
    }
    auto made = std::make_shared<Engine>(std::move(world), settings, wiring);
    remember_descriptors(made->descriptors());
    const std::lock_guard lock(engine_mutex);
    engine = std::move(made);
    return HVD_OK;
  });
}

hvd_status hvd_shutdown(void) {
  if (forked) return HVD_OK;  // nothing of the parent's engine is here
  return guarded([&] {
    std::shared_ptr<Engine> last;  // outlives the lock: its end joins callbacks, and those may call us
    const std::lock_guard life_cycle(life_cycle_mutex);
    {
      const std::lock_guard lock(engine_mutex);
      last.swap(engine);
    }
    if (!last) return HVD_OK;
    last->shutdown();
    forget_descriptors();
    hvd::release_kept_results();
    return HVD_OK;
  });
}

int hvd_is_initialized(void) { return !forked && current_engine() != nullptr; }

hvd_status hvd_get_place(int32_t process_set, hvd_place* place) {
  return guarded([&] {
    if (place->struct_size != sizeof(hvd_place)) throw InvalidError("hvd_place: unknown size of the structure");
    const auto running = running_engine();
    const hvd::World& world = running->world();
    const std::vector<int> ranks = running->ranks_of(process_set);
    if (ranks.empty()) throw InvalidError("There is no process set with id " + std::to_string(process_set) + ".");
    const auto own = std::lower_bound(ranks.begin(), ranks.end(), world.rank);
    const bool member = own != ranks.end() && *own == world.rank;
    *place = {sizeof(hvd_place),
              world.rank,
              world.size,
              world.local_rank,
              world.local_size,
              member ? static_cast<int32_t>(own - ranks.begin()) : -1,
              static_cast<int32_t>(ranks.size())};
    return HVD_OK;
  });
}

hvd_status hvd_submit(const hvd_request* request, hvd_handle* handle) {
  *handle = 0;
  return guarded([&] {
    const auto running = running_engine();
    const auto made = make_request(*request);
    const hvd_handle kept = keep(made);  // first: once it is submitted nothing may fail any more
    try {
      running->submit(made);
    } catch (...) {
      forget(kept);
      throw;
    }
    *handle = kept;
    return HVD_OK;
  });
}

hvd_status hvd_poll(hvd_handle handle) {
  return guarded([&] { return outcome(*find(handle)); });
}

hvd_status hvd_wait(hvd_handle handle, int64_t timeout_ms) {
  return guarded([&] {
    const auto request = find(handle);
    // A request that is still pending has an engine, unless that is just being shut down; then it ends at once.
    if (const auto running = current_engine()) running->wait(request, to_ns(timeout_ms));
    return outcome(*request);
  });
}

hvd_status hvd_release(hvd_handle handle) {
  return guarded([&] {
    forget(handle);
    return HVD_OK;
  });
}

hvd_status hvd_run(const hvd_request* request, int64_t timeout_ms, hvd_handle* handle) {
  *handle = 0;
  return guarded([&] {
    const auto running = running_engine();
    const auto made = make_request(*request);
    const bool may_wait = timeout_ms >= 0;
    const hvd_handle kept = may_wait || has_result(*made) ? keep(made) : 0;
    try {
      running->run(made, to_ns(timeout_ms));
    } catch (...) {
      forget(kept);
      throw;
    }
    const hvd_status status = made->status.load();
    if (status == HVD_PENDING || (status == HVD_OK && has_result(*made))) {
      *handle = kept;
    } else {
      forget(kept);
    }
    return outcome(*made);
  });
}

hvd_status hvd_take_result(hvd_handle handle, hvd_result* result) {
  return guarded([&] {
    const auto request = find(handle);
    if (result->struct_size != sizeof(hvd_result)) throw InvalidError("hvd_result: unknown size of the structure");
    if (request->status.load() != HVD_OK || !has_result(*request)) {
      throw InvalidError("handle " + std::to_string(handle) + " has no result to take");
    }
    *result = {sizeof(hvd_result),
               request->data.release(),
               static_cast<int32_t>(request->result_shape.size()),
               request->result_shape.data(),
               static_cast<int32_t>(request->received.size()),
               request->received.data(),
               request->value};
    return HVD_OK;
  });
}

void hvd_free_data(void* data) { hvd::free_result(data); }

void* hvd_alloc(size_t bytes) {
  try {
    return hvd::Arena::of_process().allocate(bytes);
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

int hvd_arena_fd(void) {
  try {
    return hvd::Arena::of_process().fd();
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

void hvd_free(void* pointer) {
  if (pointer != nullptr) hvd::Arena::of_process().free(pointer);  // which exists: the pointer came from it
}

hvd_status hvd_get_counters(hvd_counters* counters) {
  return guarded([&] {
    const auto running = running_engine();
    const hvd::Counters& c = running->counters();
    if (counters->struct_size != sizeof(hvd_counters)) throw InvalidError("hvd_counters: unknown size");
    *counters = {sizeof(hvd_counters),
                 c.requests_submitted.get(),
                 c.requests_by_bit.get(),
                 c.request_messages.get(),
                 c.log_entries.get(),
                 c.batches.get(),
                 c.tensors.get(),
                 c.bytes_in.get(),
                 c.chunks.get(),
                 c.bytes_placed.get(),
                 c.doorbells.get(),
                 c.sleeps.get(),
                 c.role_changes.get(),
                 c.log_bytes.get(),
                 c.cache_evictions.get(),
                 c.stall_warnings.get(),
                 c.net_bytes_out.get(),
                 c.net_payload_out.get(),
                 c.net_frames_out.get(),
                 c.control_bytes.get(),
                 c.control_records.get(),
                 c.requests_standing.get(),
                 c.requests_in_sequence.get()};
    return HVD_OK;
  });
}
