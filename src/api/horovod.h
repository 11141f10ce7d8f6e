// The C interface of the Horovod engine: everything above it (the Python extension, the framework shims) uses only
// this header. One engine per process, shared by all frameworks in it.
//
// Conventions
//   - Every function that can fail returns an hvd_status; hvd_last_error() then holds the text for this thread.
//   - No C++ exception crosses this interface. No function takes or needs the Python GIL.
//   - Functions may be called from any thread. In a forked child every one fails with HVD_FORKED.
//   - Structures begin with struct_size so that fields can be added at their end.
#ifndef HOROVOD_API_HOROVOD_H_
#define HOROVOD_API_HOROVOD_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HVD_EXPORT __attribute__((visibility("default")))
#else
#define HVD_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Codes 0 to 9 are those of the existing Horovod.
typedef enum {
  HVD_UINT8 = 0,
  HVD_INT8 = 1,
  HVD_UINT16 = 2,
  HVD_INT16 = 3,
  HVD_INT32 = 4,
  HVD_INT64 = 5,
  HVD_FLOAT16 = 6,
  HVD_FLOAT32 = 7,
  HVD_FLOAT64 = 8,
  HVD_BOOL = 9,
  HVD_BFLOAT16 = 10,
  HVD_UINT32 = 11,
  HVD_UINT64 = 12,
  HVD_COMPLEX64 = 13,
  HVD_COMPLEX128 = 14,
  HVD_FLOAT8_E4M3FN = 15,  // moved, not reduced
  HVD_FLOAT8_E5M2 = 16,    // moved, not reduced
} hvd_dtype;
#define HVD_DTYPES 17

typedef enum {
  HVD_AVERAGE = 0,
  HVD_SUM = 1,
  HVD_ADASUM = 2,
  HVD_MIN = 3,
  HVD_MAX = 4,
  HVD_PRODUCT = 5,
} hvd_reduce_op;

typedef enum {
  HVD_ALLREDUCE = 0,
  HVD_ALLGATHER = 1,
  HVD_BROADCAST = 2,
  HVD_ALLTOALL = 3,
  HVD_REDUCESCATTER = 4,
  HVD_BARRIER = 5,
  HVD_JOIN = 6,                // this rank has no more data; ends when all ranks have joined
  HVD_ADD_PROCESS_SET = 7,     // every rank of the job submits it, with the same ranks
  HVD_REMOVE_PROCESS_SET = 8,  // every rank of the job submits it, with the same id
} hvd_op;

typedef enum {
  HVD_OK = 0,
  HVD_PENDING = 1,          // hvd_poll, hvd_wait: not finished (hvd_wait: within the time given)
  HVD_INVALID = 2,          // the caller's mistake, seen on this rank alone
  HVD_NOT_INITIALIZED = 3,  // before hvd_init or after hvd_shutdown
  HVD_MISMATCH = 4,         // ranks disagree about one tensor: the same error on all of them; the job goes on
  HVD_SHUT_DOWN = 5,        // this rank or a peer has shut down
  HVD_PEER_LOST = 6,        // a peer died, fell silent or gave up
  HVD_STALLED = 7,          // given up because ranks did not submit a tensor for too long
  HVD_SYSTEM = 8,           // the operating system refused something (memory, descriptors)
  HVD_FORKED = 9,           // called in a child made by fork() after hvd_init
} hvd_status;

typedef int64_t hvd_handle;  // positive; never reused within a process

// The text of the last failure on the calling thread ("" if there was none). Valid until this thread's next call.
HVD_EXPORT const char* hvd_last_error(void);
HVD_EXPORT const char* hvd_version(void);

// ---- Encryption -----------------------------------------------------------------------------------------------------

// TLS 1.3 over a connected, non-blocking socket, by a key that is for this connection alone; by OpenSSL's libssl, found
// at run time. None of these functions waits. A session is used by one thread at a time.
typedef struct hvd_tls hvd_tls;
#define HVD_TLS_KEY_BYTES 32

// Looks for the library by name or path (NULL: libssl.so.3) and tells its version. HVD_SYSTEM if it can't be used.
HVD_EXPORT hvd_status hvd_tls_load(const char* library, const char** version);
// Makes one end of a session, which is the caller's to close, also after hvd_init has taken what is in it. Either side
// may listen, but one must.
HVD_EXPORT hvd_status hvd_tls_open(const char* library, int listening, const uint8_t* key, hvd_tls** session);
HVD_EXPORT void hvd_tls_close(hvd_tls* session);
// HVD_PENDING until the handshake is done; then call it again when the socket is readable (or writable, if there is
// output). HVD_SYSTEM if the other side does not know the key.
HVD_EXPORT hvd_status hvd_tls_handshake(hvd_tls* session, int fd);
// Reads up to so many bytes; *read is 0 when the connection was closed or reset. HVD_PENDING if there are none now.
// HVD_SYSTEM if the connection has failed or somebody has changed what was sent. To be called until it is HVD_PENDING:
// that the socket has nothing does not mean that the session has nothing.
HVD_EXPORT hvd_status hvd_tls_read(hvd_tls* session, int fd, void* into, size_t bytes, size_t* read);
// Takes up to so many bytes to be sent. HVD_PENDING if it takes none now.
HVD_EXPORT hvd_status hvd_tls_write(hvd_tls* session, int fd, const void* data, size_t bytes, size_t* written);
// Sends what the session still holds. HVD_PENDING while there is output left, for which the socket has no room.
HVD_EXPORT hvd_status hvd_tls_flush(hvd_tls* session, int fd);
HVD_EXPORT int hvd_tls_has_output(const hvd_tls* session);

// ---- Life cycle -----------------------------------------------------------------------------------------------------

// Makes the shared-memory segment of one host and one generation: an anonymous, sealed, close-on-exec memfd, laid out
// for local_size ranks of a job of size. Called by local rank 0, which hands the descriptor to the others. *fd is the
// caller's to close (after hvd_init: the engine maps the segment and does not keep the descriptor).
HVD_EXPORT hvd_status hvd_segment_create(int32_t local_size, int32_t size, int32_t cache_capacity, uint64_t generation,
                                         uint64_t nonce, int* fd);
// Maps fd for a moment and reads back its nonce and generation: shows that this process really shares the memory.
HVD_EXPORT hvd_status hvd_segment_probe(int fd, uint64_t* generation, uint64_t* nonce);

typedef struct {
  uint32_t struct_size;
  int32_t rank, size, local_rank, local_size, cross_rank, cross_size;
  int segment_fd;
  // The hosts, in the order in which results are folded. Local ranks ascend with ranks, and rank 0 is local rank 0.
  int32_t n_hosts;
  const char* const* hosts;  // names, for messages
  const int32_t* host_of;    // by rank: its host
  const int32_t* pids;       // by rank, for messages
  // Connected and authenticated stream sockets. The engine duplicates all descriptors that it keeps.
  const int* links;     // by rank: to every rank of another host; -1 for those of our own
  const int* controls;  // by host. Rank 0: to local rank 0 of that host. Local rank 0 of another host: to rank 0, at
                        // index 0. -1 elsewhere
  // Sessions over these, whose handshakes are done; NULL where a connection is not encrypted. hvd_init takes what is in
  // them, so that they can't be used any more.
  hvd_tls* const* link_sessions;     // by rank
  hvd_tls* const* control_sessions;  // by host
  // By local rank.
  const int* alive_fds;  // readable once that rank is gone (a pidfd); -1: unknown, heartbeat alone watches it
  const int* doorbells;  // two eventfds per local rank: 2 * r for its background thread, 2 * r + 1 for its waiters
  const int* arena_fds;  // hvd_arena_fd of each; -1: it shares no memory. NULL: nobody does
  // Static process sets besides the global one (id 0); they get the ids 1, 2, ... Ranks are global and ascending.
  int32_t n_process_sets;
  const int32_t* process_set_sizes;
  const int32_t* process_set_ranks;  // all sets' ranks, one set after the other
  // Tunables. Zero is a value; every field must be set.
  int64_t fusion_threshold;  // bytes; 0: no fusion
  int32_t cache_capacity;    // names agreed on by bits; 0: none. As given to hvd_segment_create
  double heartbeat_timeout;  // seconds after which a silent peer is given up
  double stall_warning;      // seconds; 0: no stall check
  double stall_shutdown;     // seconds; 0: never
  int32_t allreduce_ring;    // between hosts: reduce along a ring instead of directly
  int32_t log_level;         // 0 trace, 1 debug, 2 info, 3 warning, 4 error, 5 fatal
  int32_t log_hide_time;
} hvd_config;

HVD_EXPORT hvd_status hvd_init(const hvd_config* config);
// Fails everything pending with HVD_SHUT_DOWN, tells the peers, ends all threads, unmaps. Safe without hvd_init.
HVD_EXPORT hvd_status hvd_shutdown(void);
// 1 between a successful hvd_init and hvd_shutdown, also after a peer was lost.
HVD_EXPORT int hvd_is_initialized(void);

// Where this rank is, in the job and in a process set.
typedef struct {
  uint32_t struct_size;
  int32_t rank, size, local_rank, local_size;
  int32_t set_rank, set_size;  // set_rank: among the members; -1 for one that is not
} hvd_place;
// HVD_INVALID if there is no such set.
HVD_EXPORT hvd_status hvd_get_place(int32_t process_set, hvd_place* place);

// ---- Operations -----------------------------------------------------------------------------------------------------

// Called once when the operation has ended, on a thread of the completion pool; may block. message is "" on success.
typedef void (*hvd_callback)(void* context, hvd_status status, const char* message);
// Allocates the result of an allgather or alltoall, whose first dimension is known only then. Called once, on the
// thread that drives the engine, so it must be quick and must not call the engine. NULL: no memory, the operation
// fails.
typedef void* (*hvd_allocate)(void* context, int32_t ndim, const int64_t* shape);

typedef struct {
  uint32_t struct_size;
  hvd_op op;
  const char* name;  // unique among this rank's pending operations of the set; at most HVD_MAX_NAME bytes
  size_t name_length;
  hvd_dtype dtype;
  hvd_reduce_op reduce_op;  // allreduce, reducescatter
  int32_t root;             // broadcast: a global rank; HVD_REMOVE_PROCESS_SET: the id
  int32_t process_set;      // 0: all ranks
  double prescale, postscale;
  int32_t ndim;
  const int64_t* shape;
  const void* input;
  void* output;           // may equal input; both stay valid until the operation has ended. reducescatter: room for
                          // this rank's rows. allgather, alltoall: not used
  hvd_callback callback;  // or NULL
  void* context;
  // alltoall: how many rows go to each member of the set, in their order; none: equal parts.
  // HVD_ADD_PROCESS_SET: the global ranks, ascending.
  const int64_t* splits;
  int32_t n_splits;
  hvd_allocate allocate;  // allgather, alltoall: NULL leaves the allocation to the engine, see hvd_take_result
} hvd_request;

#define HVD_MAX_NAME 4096
#define HVD_MAX_DIMS 64

// Starts an operation. *handle is to be given to hvd_release (or hvd_run's rules below) exactly once.
HVD_EXPORT hvd_status hvd_submit(const hvd_request* request, hvd_handle* handle);
// HVD_OK or the operation's error when it has ended, HVD_PENDING before, HVD_INVALID for an unknown handle.
HVD_EXPORT hvd_status hvd_poll(hvd_handle handle);
// As hvd_poll, but waits up to timeout_ms (negative: for ever) and drives the engine meanwhile.
HVD_EXPORT hvd_status hvd_wait(hvd_handle handle, int64_t timeout_ms);
// Forgets an ended handle. A pending one is forgotten when it ends.
HVD_EXPORT hvd_status hvd_release(hvd_handle handle);
// Submit and wait in one step, without hand-over between threads: the way to run a blocking operation. On HVD_PENDING
// *handle must be waited for and released. On HVD_OK of an operation that has a result to take (see there) it must be
// released. Otherwise *handle is 0 and there is nothing to release.
HVD_EXPORT hvd_status hvd_run(const hvd_request* request, int64_t timeout_ms, hvd_handle* handle);

// What an operation has given besides filling its output.
typedef struct {
  uint32_t struct_size;
  // allgather, alltoall without hvd_request.allocate: the memory, now the caller's, for hvd_free_data. Else NULL.
  void* data;
  int32_t ndim;
  const int64_t* shape;  // allgather, alltoall: of the result. Valid until hvd_release
  int32_t n_received;
  const int64_t* received;  // allgather, alltoall: the rows that came from each member. Valid until hvd_release
  int32_t value;            // join: the rank that joined last; HVD_ADD_PROCESS_SET: the id
} hvd_result;
// Of allgather, alltoall, join and HVD_ADD_PROCESS_SET, once they have ended with HVD_OK; data can be taken once.
HVD_EXPORT hvd_status hvd_take_result(hvd_handle handle, hvd_result* result);
HVD_EXPORT void hvd_free_data(void* data);

// ---- Memory ---------------------------------------------------------------------------------------------------------

// Memory on pages that the host's ranks can share, for arrays that are reduced often. Belongs to the caller until
// hvd_free, whatever happens to the engine meanwhile. NULL if there is none. Aligned to a page. A child of fork()
// shares it with its parent.
HVD_EXPORT void* hvd_alloc(size_t bytes);
HVD_EXPORT void hvd_free(void* pointer);
// The descriptor by which peers can read that memory; it stays ours. -1 if there is none.
HVD_EXPORT int hvd_arena_fd(void);

// ---- Counters -------------------------------------------------------------------------------------------------------

// What this rank's engine has done since hvd_init: tests assert algorithms by these, never by time.
typedef struct {
  uint32_t struct_size;
  uint64_t requests_submitted;
  uint64_t requests_by_bit;   // submitted by a cached id: no message
  uint64_t request_messages;  // full requests sent to the coordinator
  uint64_t log_entries;       // read by this rank
  uint64_t batches;           // run by this rank
  uint64_t tensors;           // in those batches
  uint64_t bytes_in;          // copied into shared memory
  uint64_t chunks;            // published to peers
  uint64_t bytes_placed;      // reduced where they lay, in memory from hvd_alloc, without copying them in
  uint64_t doorbells;         // system calls made to wake a peer (or our own background thread)
  uint64_t sleeps;            // times this rank's driver went to sleep
  uint64_t role_changes;      // times the driver's role went to another thread
  uint64_t log_bytes;         // coordinator: appended to the log
  uint64_t cache_evictions;   // coordinator
  uint64_t stall_warnings;    // coordinator
  uint64_t net_bytes_out;     // sent to ranks on other hosts, headers included
  uint64_t net_payload_out;   // of these, payload of collectives
  uint64_t net_frames_out;
  uint64_t control_bytes;  // sent between the ranks that speak for their hosts
  uint64_t control_records;
  uint64_t requests_standing;     // of those by a cached id: submitted under a standing order, without agreement
  uint64_t requests_in_sequence;  // of those by a cached id: counted, as the next one of a step that is repeated
} hvd_counters;
HVD_EXPORT hvd_status hvd_get_counters(hvd_counters* counters);

#ifdef __cplusplus
}
#endif
#endif  // HOROVOD_API_HOROVOD_H_
