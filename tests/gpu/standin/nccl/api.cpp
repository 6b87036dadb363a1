// NCCL's functions.

#include <nccl.h>

#include <atomic>
#include <cstring>

#include "../driver/failures.h"
#include "../driver/handles.h"
#include "../driver/inside.h"
#include "../standin.h"
#include "communicator.h"
#include "group.h"
#include "operation.h"
#include "reduction.h"

#define NCCL_ENTRY extern "C" EXPORTED ncclResult_t

// Returns from the enclosing function if a test has injected a failure.
#define ENTER() \
  if (auto code = standin::take_failure(__func__)) return static_cast<ncclResult_t>(*code)

using standin::Communicator;
using standin::Kind;
using standin::Operation;

namespace {

constexpr const char* kWords[] = {
    "no error",
    "a call of CUDA failed",
    "a call of the system failed",
    "internal error",
    "invalid argument",
    "invalid usage",
    "a remote process has gone or its connection has broken",
    "still in progress",
    "timed out",
};

standin::Handles<Communicator>& communicators() {
  static auto* handles = new standin::Handles<Communicator>;
  return *handles;
}

ncclComm_t handle_of(const Communicator* communicator) {
  return reinterpret_cast<ncclComm_t>(const_cast<Communicator*>(communicator));
}

// How many communicators were aborted.
std::atomic<int> aborted{0};

// The calling thread's last error, for calls without a communicator.
thread_local std::string last_error;

ncclResult_t refuse(ncclResult_t code, std::string reason) {
  last_error = std::move(reason);
  return code;
}

bool is_blocking(const ncclConfig_t* config) {
  return !config || config->blocking == NCCL_CONFIG_UNDEF_INT || config->blocking != 0;
}

bool is_initialised(const ncclConfig_t* config) {
  return !config ||
         (config->magic == NCCL_API_MAGIC && config->size >= offsetof(ncclConfig_t, blocking));
}

ncclResult_t init(ncclComm_t* handle, int ranks, ncclUniqueId id, int rank, int device,
                  const ncclConfig_t* config) {
  *handle = nullptr;
  if (!is_initialised(config)) {
    return refuse(ncclInvalidArgument, "the configuration was not initialised");
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return refuse(ncclInvalidArgument,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  }
  if (device < 0) {
    return refuse(ncclUnhandledCudaError, "no device is current");
  }
  standin::BootstrapId bootstrap;
  std::memcpy(&bootstrap, id.internal, sizeof bootstrap);
  auto made = std::make_shared<Communicator>(rank, ranks, device, is_blocking(config));
  if (!made->is_blocking()) {
    *handle = handle_of(communicators().add(made));
    return made->do_call([=] { return made->join(bootstrap); });
  }
  return standin::call_concurrently([=] {
    ncclResult_t outcome = made->join(bootstrap);
    if (outcome != ncclSuccess) {
      return refuse(outcome, made->last_error());
    }
    *handle = handle_of(communicators().add(made));
    return ncclSuccess;
  });
}

ncclResult_t refuse_unless_ready(Communicator& communicator) {
  ncclResult_t error = communicator.error();
  if (error == ncclInProgress) {
    return refuse(ncclInvalidArgument, "the communicator is in progress with the call before");
  }
  return error == ncclSuccess ? error : refuse(error, communicator.last_error());
}

ncclResult_t queue(ncclComm_t handle, cudaStream_t stream, const Operation& operation) {
  auto communicator = communicators().find(handle);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  if (standin::element_bytes(operation.type) == 0 || !standin::is_known(operation.reduction)) {
    return refuse(ncclInvalidArgument, "unknown type or reduction");
  }
  if (operation.root < 0 || operation.root >= communicator->ranks()) {
    return refuse(ncclInvalidArgument, "there is no rank " + std::to_string(operation.root));
  }
  if (communicator->is_finalized()) {
    return refuse(ncclInvalidUsage, "the communicator has been finalised");
  }
  if (ncclResult_t refused = refuse_unless_ready(*communicator); refused != ncclSuccess) {
    return refused;
  }
  int device = standin::index_of_device_of(stream);
  if (device != communicator->device()) {
    return refuse(ncclInvalidUsage, "the stream is of device " + std::to_string(device) +
                                        ", the communicator of device " +
                                        std::to_string(communicator->device()));
  }
  return standin::call(communicator, stream, operation);
}

}  // namespace

static_assert(sizeof(standin::BootstrapId) <= NCCL_UNIQUE_ID_BYTES);

NCCL_ENTRY ncclGetVersion(int* version) {
  ENTER();
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

NCCL_ENTRY ncclGetUniqueId(ncclUniqueId* id) {
  ENTER();
  try {
    auto bootstrap = standin::start_bootstrap();
    std::memset(id->internal, 0, sizeof id->internal);
    std::memcpy(id->internal, &bootstrap, sizeof bootstrap);
    return ncclSuccess;
  } catch (const standin::Lost& lost) {
    return refuse(ncclSystemError, lost.reason);
  }
}

NCCL_ENTRY ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                  ncclConfig_t* config) {
  ENTER();
  return init(comm, ranks, id, rank, standin::index_of_current_device(), config);
}

NCCL_ENTRY ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  ENTER();
  return init(comm, ranks, id, rank, standin::index_of_current_device(), nullptr);
}

NCCL_ENTRY ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  ENTER();
  ncclUniqueId id;
  if (ncclResult_t outcome = ncclGetUniqueId(&id); outcome != ncclSuccess) {
    return outcome;
  }
  standin::start_group();
  for (int rank = 0; rank < count; ++rank) {
    init(&comms[rank], count, id, rank, devices ? devices[rank] : rank, nullptr);
  }
  return standin::end_group();
}

NCCL_ENTRY ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                         ncclConfig_t* config) {
  ENTER();
  *made = nullptr;
  auto communicator = communicators().find(comm);
  if (!communicator || !is_initialised(config)) {
    return refuse(ncclInvalidArgument, "there is no such communicator, or configuration");
  }
  return standin::call_concurrently([=] {
    std::shared_ptr<Communicator> child;
    ncclResult_t outcome = communicator->split(color, key, child);
    if (outcome == ncclSuccess && child) {
      *made = handle_of(communicators().add(child));
    }
    return outcome;
  });
}

NCCL_ENTRY ncclCommFinalize(ncclComm_t comm) {
  ENTER();
  auto communicator = communicators().find(comm);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  if (ncclResult_t refused = refuse_unless_ready(*communicator); refused != ncclSuccess) {
    return refused;
  }
  return communicator->do_call([communicator] {
    communicator->leave();
    return ncclSuccess;
  });
}

// Waits for all calls, forever if a peer is gone; only ncclCommAbort helps then.
NCCL_ENTRY ncclCommDestroy(ncclComm_t comm) {
  ENTER();
  auto communicator = communicators().find(comm);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  communicator->leave();
  communicators().take(comm);
  return ncclSuccess;
}

NCCL_ENTRY ncclCommAbort(ncclComm_t comm) {
  ENTER();
  auto communicator = communicators().take(comm);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  ++aborted;
  communicator->abort();
  return ncclSuccess;
}

NCCL_ENTRY ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  ENTER();
  auto communicator = communicators().find(comm);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  *error = communicator->error();
  return ncclSuccess;
}

NCCL_ENTRY ncclCommCount(const ncclComm_t comm, int* count) {
  ENTER();
  auto communicator = communicators().find(comm);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  *count = communicator->ranks();
  return ncclSuccess;
}

NCCL_ENTRY ncclCommCuDevice(const ncclComm_t comm, int* device) {
  ENTER();
  auto communicator = communicators().find(comm);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  *device = communicator->device();
  return ncclSuccess;
}

NCCL_ENTRY ncclCommUserRank(const ncclComm_t comm, int* rank) {
  ENTER();
  auto communicator = communicators().find(comm);
  if (!communicator) {
    return refuse(ncclInvalidArgument, "there is no such communicator");
  }
  *rank = communicator->rank();
  return ncclSuccess;
}

extern "C" EXPORTED const char* ncclGetErrorString(ncclResult_t code) {
  bool is_known = code >= 0 && code < static_cast<int>(std::size(kWords));
  return is_known ? kWords[code] : "unknown result";
}

extern "C" EXPORTED const char* ncclGetLastError(ncclComm_t comm) {
  if (auto communicator = communicators().find(comm)) {
    last_error = communicator->last_error();
  }
  return last_error.c_str();
}

NCCL_ENTRY ncclGroupStart() {
  ENTER();
  standin::start_group();
  return ncclSuccess;
}

NCCL_ENTRY ncclGroupEnd() {
  ENTER();
  return standin::end_group();
}

NCCL_ENTRY ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                         ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::AllReduce, from, to, count, type, reduction, 0});
}

NCCL_ENTRY ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                             ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::ReduceScatter, from, to, count, type, reduction, 0});
}

NCCL_ENTRY ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                         ncclComm_t comm, cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::AllGather, from, to, count, type, ncclSum, 0});
}

NCCL_ENTRY ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                      ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::Reduce, from, to, count, type, reduction, root});
}

NCCL_ENTRY ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::Broadcast, from, to, count, type, ncclSum, root});
}

NCCL_ENTRY ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                     cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::Broadcast, data, data, count, type, ncclSum, root});
}

NCCL_ENTRY ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::Send, from, nullptr, count, type, ncclSum, peer});
}

NCCL_ENTRY ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream) {
  ENTER();
  return queue(comm, stream, {Kind::Receive, nullptr, to, count, type, ncclSum, peer});
}

EXPORTED void standin_nccl_set_async_error(ncclComm* comm, int code) {
  if (auto communicator = communicators().find(comm)) {
    communicator->set_error(static_cast<ncclResult_t>(code));
  }
}

EXPORTED int standin_nccl_aborted(void) { return aborted; }

EXPORTED void standin_nccl_delay_calls(int microseconds) { standin::delay_calls(microseconds); }

EXPORTED void standin_nccl_set_small(size_t bytes) { standin::set_small(bytes); }
