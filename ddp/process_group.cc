#include "ddp/process_group.h"

#include <exception>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/failure_notice.h"
#include "ddp/comm/gloo_backend.h"
#include "ddp/comm/nccl_backend.h"
#include "ddp/error.h"
#include "ddp/worker_environment.h"
#include "store/redis_store.h"

namespace ddp {
namespace {

c10::intrusive_ptr<c10d::Store> Prefixed(const std::string& prefix,
                                         const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

std::string ChooseBackend(const std::string& wanted) {
  if (wanted.empty()) return NcclAvailable() ? "nccl" : "gloo";
  if (wanted == "gloo" || wanted == "nccl") return wanted;
  throw ConfigurationError(
      absl::StrCat("backend \"", wanted, "\" is unknown; there are gloo and nccl"));
}

c10::intrusive_ptr<c10d::Store> TorchrunStore(const WorkerEnvironment& env,
                                              std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = env.rank == 0 && !env.agent_store;
  options.multiTenant = !env.agent_store;
  options.numWorkers = env.world_size;
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(env.master_addr, options);
}

c10::intrusive_ptr<c10d::Store> ConnectStore(const WorkerEnvironment& env,
                                             std::chrono::milliseconds timeout) {
  const std::string where =
      env.store_url.empty() ? absl::StrCat(env.master_addr, ":", env.master_port) : env.store_url;
  try {
    if (env.store_url.empty()) return TorchrunStore(env, timeout);
    return store::RedisStore::connect(env.store_url, timeout);
  } catch (const c10::ValueError& error) {
    throw ConfigurationError(absl::StrCat(
        "rank ", env.rank, ": ", env.store_url.empty() ? "MASTER_ADDR:MASTER_PORT" : "DDP_STORE",
        "=\"", where, "\" is not usable: ", error.what_without_backtrace()));
  } catch (const c10::Error& error) {
    throw CommunicationError(absl::StrCat("rank ", env.rank, ": no store at ", where, ": ",
                                          error.what_without_backtrace()));
  }
}

}  // namespace

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Store> store, const Place& place,
                           const ProcessGroupOptions& options)
    : place_(place),
      store_(std::move(store)),
      backend_(ChooseBackend(options.backend)),
      exceptions_at_start_(std::uncaught_exceptions()) {
  const absl::Duration timeout = absl::FromChrono(options.timeout);
  notice_ = std::make_shared<FailureNotice>(Prefixed("ddp/notice", store_), place.rank, place.size);
  c10::intrusive_ptr<c10d::Backend> connected;
  if (backend_ == "nccl") {
    connected = MakeNcclBackend(
        Prefixed("ddp/nccl", store_),
        {.rank = place.rank, .size = place.size, .device = place.local_rank, .timeout = timeout});
  } else if (place.size > 1) {
    connected = MakeGlooBackend(Prefixed("ddp/gloo", store_),
                                {.rank = place.rank,
                                 .size = place.size,
                                 .timeout = timeout,
                                 .single_host = place.local_size == place.size});
  }
  communicator_ = std::make_unique<Communicator>(
      std::move(connected), notice_,
      Communicator::Options{.rank = place.rank, .size = place.size, .timeout = timeout});
}

ProcessGroup::~ProcessGroup() {
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    report_failure(absl::StrCat("an exception ended the program of rank ", place_.rank,
                                "; its own output says which"));
  }
}

at::Device ProcessGroup::device() const {
  if (backend_ != "nccl") return at::Device(at::kCPU);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(place_.local_rank));
}

void ProcessGroup::all_reduce(at::Tensor tensor) {
  Communicator::Pending pending = communicator_->AllReduce(std::move(tensor), "an all-reduce");
  communicator_->Wait(pending);
}

void ProcessGroup::broadcast(at::Tensor tensor, int root) {
  Communicator::Pending pending = communicator_->Broadcast(
      std::move(tensor), root, absl::StrCat("a broadcast from rank ", root));
  communicator_->Wait(pending);
}

void ProcessGroup::barrier() { communicator_->Barrier(device()); }

void ProcessGroup::report_failure(const std::string& reason) { notice_->Report(reason); }

std::shared_ptr<ProcessGroup> init_process_group(const ProcessGroupOptions& options) {
  const absl::StatusOr<WorkerEnvironment> env = WorkerEnvironment::FromEnvironment();
  if (!env.ok()) throw ConfigurationError(std::string(env.status().message()));
  if (options.expected_world_size >= 0 && options.expected_world_size != env->world_size) {
    throw ConfigurationError(
        absl::StrCat("this program expects a world size of ", options.expected_world_size,
                     ", but it was started with WORLD_SIZE=", env->world_size));
  }
  ChooseBackend(options.backend);  // before anything is connected
  return std::make_shared<ProcessGroup>(ConnectStore(*env, options.timeout),
                                        ProcessGroup::Place{.rank = env->rank,
                                                            .size = env->world_size,
                                                            .local_rank = env->local_rank,
                                                            .local_size = env->local_world_size},
                                        options);
}

}  // namespace ddp
