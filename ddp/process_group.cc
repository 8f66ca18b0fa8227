#include "ddp/process_group.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "ddp/collective_arguments.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/collective_check.h"
#include "ddp/comm/collective_log.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/debug_level.h"
#include "ddp/comm/failure_notice.h"
#include "ddp/comm/gloo_backend.h"
#include "ddp/comm/nccl_backend.h"
#include "ddp/comm/renewal.h"
#include "ddp/comm/store_meeting.h"
#include "ddp/comm/work_future.h"
#include "ddp/common/error.h"
#include "ddp/health/group_health.h"
#include "ddp/work_state.h"
#include "ddp/worker_environment.h"
#include "store/redis_store/redis_store.h"
#include "xxhash.h"

namespace ddp {
namespace {

using namespace internal;  // NOLINT: most of what this file puts together

constexpr char kControlPrefix[] = "ddp/control";

// The time for which a lost store may delay a failure report, or the end of a group.
constexpr std::chrono::milliseconds kNewsTimeout{5000};

// The time limit of connecting again. All ranks were connected a moment ago, so connecting is fast,
// or a rank has died.
constexpr std::chrono::milliseconds kReconnectTimeout{60000};

c10::intrusive_ptr<c10d::Store> Prefixed(const std::string& prefix,
                                         const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

std::string BackendPrefix(const std::string& backend, int64_t incarnation) {
  return absl::StrCat("ddp/", backend, "/", incarnation);
}

// Returns the backend's name; empty when the program makes the backend, which then names itself.
std::string ChooseBackend(const ProcessGroupOptions& options) {
  const std::string& wanted = options.backend;
  if (options.make_backend() != nullptr) {
    if (wanted.empty()) return wanted;
    throw ConfigurationError(absl::StrCat("the options name a backend, \"", wanted,
                                          "\", and make one (make_backend); choose one of them"));
  }
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

Work MakeWork(const std::shared_ptr<Communicator>& communicator, int rank,
              Communicator::Pending pending, const PreparedCollective& prepared) {
  auto state = std::make_shared<Work::State>();
  state->rank = rank;
  state->communicator = communicator;
  state->future = Communicator::FutureOf(pending);
  state->pending = std::move(pending);
  state->tensors = prepared.outputs;
  state->value_is_tensors = prepared.finish != nullptr;
  return Work(std::move(state));
}

void CheckTag(const std::string& backend, int rank, int tag) {
  if (backend != "nccl" || tag == 0) return;
  throw ConfigurationError(absl::StrCat("rank ", rank, ": a message has tag ", tag,
                                        ", and NCCL has no tags: its messages arrive in order"));
}

// Throws CommunicationError for a failure of no single rank, else PeerFailedError.
}  // namespace

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Store> store, const Place& place,
                           const ProcessGroupOptions& options)
    : ProcessGroup(std::move(store), place, options, ChooseBackend(options)) {}

ProcessGroup::Place ProcessGroup::PlaceOf(const c10::intrusive_ptr<c10d::Backend>& backend) {
  if (!backend) throw ConfigurationError("the backend of a process group is null");
  const std::optional<at::Device> bound = backend->getBoundDeviceId();
  return {.rank = backend->getRank(),
          .size = backend->getSize(),
          .local_rank = bound.has_value() ? bound->index() : 0,
          .local_size = 0};
}

// Returns options whose make_backend returns `backend` once: a connected backend serves one
// incarnation of one group.
ProcessGroupOptions ProcessGroup::OptionsFor(const c10::intrusive_ptr<c10d::Backend>& backend,
                                             const ProcessGroupOptions& options) {
  if (!options.backend().empty() || options.make_backend() != nullptr) {
    throw ConfigurationError(
        "a process group of a backend of the program's own takes no option backend or "
        "make_backend");
  }
  ProcessGroupOptions own = options;
  own.make_backend = [backend,
                      used = std::make_shared<bool>(false)](const BackendRequest& request) {
    if (!std::exchange(*used, true)) return backend;
    throw CommunicationError(absl::StrCat(
        "rank ", request.rank, ": this process group was made of one connected backend and cannot ",
        "connect another one. ProcessGroupOptions::make_backend makes groups that go on after a ",
        "failure and have parts (new_group)"));
  };
  return own;
}

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Store> store, const Place& place,
                           const ProcessGroupOptions& options, std::string backend)
    : place_(place),
      options_(options),
      store_(std::move(store)),
      control_(Prefixed(kControlPrefix, store_)),
      backend_(std::move(backend)),
      exceptions_at_start_(std::uncaught_exceptions()) {
  if (!DebugLevelFromEnvironment().ok()) {
    throw ConfigurationError(absl::StrCat(
        "rank ", place.rank, ": ", std::string(DebugLevelFromEnvironment().status().message())));
  }
  // The failure notice has a timeout and, where possible, a connection of its own. Waits in some
  // stores (a TCPStore) block other users of the connection, and a failure report must not wait for
  // them.
  const c10::intrusive_ptr<c10d::Store> news = store_->clone();
  const bool own = news.get() != store_.get();  // false for a HashStore, which has no connections
  notice_ = std::make_shared<FailureNotice>(
      Prefixed(kControlPrefix, news), place.rank, place.size,
      own ? std::min(options.timeout(), kNewsTimeout) : std::chrono::milliseconds(0));
  Connect(options.timeout);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroup::MakeBackend(
    std::chrono::milliseconds connect_timeout) {
  if (options_.make_backend() != nullptr) return MakeOwnBackend(connect_timeout);
  const std::string prefix = BackendPrefix(backend_, incarnation_);
  if (backend_ == "nccl") {
    device_ = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(place_.local_rank));
    return MakeNcclBackend(Prefixed(prefix, store_),
                           {.rank = place_.rank,
                            .size = place_.size,
                            .device = place_.local_rank,
                            .timeout = absl::FromChrono(options_.timeout)});
  }
  if (place_.size == 1) return nullptr;
  auto gloo =
      MakeGlooBackend(Prefixed(prefix, store_), {.rank = place_.rank,
                                                 .size = place_.size,
                                                 .timeout = absl::FromChrono(connect_timeout),
                                                 .single_host = place_.local_size == place_.size});
  gloo->setTimeout(options_.timeout);
  return gloo;
}

// Calls the program's make_backend and checks its result.
c10::intrusive_ptr<c10d::Backend> ProcessGroup::MakeOwnBackend(
    std::chrono::milliseconds connect_timeout) {
  c10::intrusive_ptr<c10d::Backend> own =
      options_.make_backend()({.store = Prefixed(BackendPrefix("own", incarnation_), store_),
                               .rank = place_.rank,
                               .size = place_.size,
                               .local_rank = place_.local_rank,
                               .incarnation = incarnation_,
                               .timeout = options_.timeout,
                               .connect_timeout = connect_timeout});
  if (!own || own->getRank() != place_.rank || own->getSize() != place_.size) {
    throw ConfigurationError(absl::StrCat(
        "rank ", place_.rank, " of ", place_.size, ": make_backend returned ",
        own ? absl::StrCat("a backend of rank ", own->getRank(), " of ", own->getSize())
            : std::string("no backend")));
  }
  backend_ = own->getBackendName();
  if (own->getBoundDeviceId().has_value()) {
    device_ = *own->getBoundDeviceId();
  } else if (backend_ == "nccl") {
    device_ = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(place_.local_rank));
  }
  return own;
}

void ProcessGroup::Connect(std::chrono::milliseconds connect_timeout) {
  const absl::Duration timeout = absl::FromChrono(options_.timeout);
  // Launchers number the ranks of one host consecutively.
  const bool one_host = place_.local_size == place_.size;
  const int local_begin = one_host ? 0 : place_.rank - place_.local_rank;
  const bool known = local_begin >= 0 && local_begin + place_.local_size <= place_.size;
  Communicator::Options options{.rank = place_.rank,
                                .size = place_.size,
                                .timeout = timeout,
                                .incarnation = incarnation_,
                                .local_begin = known ? local_begin : 0,
                                .local_end = known ? local_begin + place_.local_size : 0,
                                .store_is_rank_0 = place_.store_is_rank_0};
  communicator_.reset();
  try {
    c10::intrusive_ptr<c10d::Backend> connected = MakeBackend(connect_timeout);
    if (connected && IsGloo(*connected)) options.set_tag = &SetNextGlooTag;
    std::unique_ptr<CollectiveCheck> check;
    if (CurrentDebugLevel() == DebugLevel::kDetail && place_.size > 1) {
      check =
          std::make_unique<CollectiveCheck>(control_, notice_,
                                            CollectiveCheck::Options{.rank = place_.rank,
                                                                     .size = place_.size,
                                                                     .incarnation = incarnation_,
                                                                     .timeout = timeout});
    }
    communicator_ =
        std::make_shared<Communicator>(std::move(connected), notice_, options, std::move(check));
  } catch (const std::exception&) {
    communicator_ = std::make_shared<Communicator>(nullptr, notice_, options);
    throw;
  }
}

ProcessGroup::~ProcessGroup() {
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    report_failure(absl::StrCat("an exception ended the program of rank ", place_.rank,
                                "; its own output says which"));
  }
  notice_->Leave();  // before the connections close
  if (removes_keys_) RemoveKeys();
}

// The last rank to leave removes the keys that all ranks may need until then. After a failure some
// keys stay, because a rank that died does not leave.
void ProcessGroup::RemoveKeys() {
  communicator_.reset();
  notice_.reset();  // the destructor writes its last keys
  try {
    if (control_->add("left", 1) < place_.size) return;
    control_->deleteKey("left");
    for (int rank = 0; rank < place_.size; ++rank) {
      control_->deleteKey(FailureNotice::StandingKey(rank));
    }
    control_->deleteKey(StoreMeeting::VerdictKey(FailureNotice::RenewalName(incarnation_ + 1)));
    if (backend_ != "gloo" || place_.size == 1 || options_.make_backend() != nullptr) return;
    for (int64_t incarnation = 0; incarnation <= incarnation_; ++incarnation) {
      const auto addresses = Prefixed(BackendPrefix(backend_, incarnation), store_);
      for (int rank = 0; rank < place_.size; ++rank) {
        addresses->deleteKey(absl::StrCat("0/", rank));  // the name that LibTorch's Gloo gives it
      }
    }
  } catch (const std::exception&) {
    // Without a store there is nothing to remove; notice_ has logged it.
  }
}

CollectiveCaller ProcessGroup::Caller() const {
  CollectiveCaller caller{.rank = place_.rank, .size = place_.size, .backend = backend_};
  if (backend_ == "gloo" || backend_ == "nccl") caller.device = device_;
  return caller;
}

Work ProcessGroup::Start(const PreparedCollective& prepared, const char* what, int64_t index) {
  Communicator::Pending pending =
      communicator_->Start(prepared.collective, OperationName(what, index),
                           {.finish = prepared.finish, .results = prepared.outputs});
  return MakeWork(communicator_, place_.rank, std::move(pending), prepared);
}

void ProcessGroup::all_reduce(at::Tensor tensor, ReduceOp op) {
  all_reduce_async(std::move(tensor), op).wait();
}

Work ProcessGroup::all_reduce_async(at::Tensor tensor, ReduceOp op) {
  return Start(PrepareAllReduce(Caller(), tensor, op), "an all-reduce");
}

void ProcessGroup::broadcast(at::Tensor tensor, int root) {
  broadcast_async(std::move(tensor), root).wait();
}

Work ProcessGroup::broadcast_async(at::Tensor tensor, int root) {
  return Start(PrepareBroadcast(Caller(), tensor, root), "a broadcast from rank", root);
}

void ProcessGroup::all_gather(at::Tensor output, at::Tensor input) {
  all_gather_async(std::move(output), std::move(input)).wait();
}

void ProcessGroup::all_gather(std::vector<at::Tensor> outputs, at::Tensor input) {
  all_gather_async(std::move(outputs), std::move(input)).wait();
}

Work ProcessGroup::all_gather_async(at::Tensor output, at::Tensor input) {
  return Start(PrepareAllGather(Caller(), {output}, input), "an all-gather");
}

Work ProcessGroup::all_gather_async(std::vector<at::Tensor> outputs, at::Tensor input) {
  return Start(PrepareAllGather(Caller(), outputs, input), "an all-gather");
}

void ProcessGroup::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) {
  reduce_scatter_async(std::move(output), std::move(input), op).wait();
}

void ProcessGroup::reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs, ReduceOp op) {
  reduce_scatter_async(std::move(output), std::move(inputs), op).wait();
}

Work ProcessGroup::reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op) {
  return Start(PrepareReduceScatter(Caller(), output, {input}, op), "a reduce-scatter");
}

Work ProcessGroup::reduce_scatter_async(at::Tensor output, std::vector<at::Tensor> inputs,
                                        ReduceOp op) {
  return Start(PrepareReduceScatter(Caller(), output, inputs, op), "a reduce-scatter");
}

void ProcessGroup::all_to_all(at::Tensor output, at::Tensor input) {
  all_to_all_async(std::move(output), std::move(input)).wait();
}

void ProcessGroup::all_to_all(at::Tensor output, at::Tensor input,
                              const std::vector<int64_t>& output_split_sizes,
                              const std::vector<int64_t>& input_split_sizes) {
  all_to_all_async(std::move(output), std::move(input), output_split_sizes, input_split_sizes)
      .wait();
}

void ProcessGroup::all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  all_to_all_async(std::move(outputs), std::move(inputs)).wait();
}

Work ProcessGroup::all_to_all_async(at::Tensor output, at::Tensor input) {
  return Start(PrepareAllToAll(Caller(), output, input), "an all-to-all");
}

Work ProcessGroup::all_to_all_async(at::Tensor output, at::Tensor input,
                                    const std::vector<int64_t>& output_split_sizes,
                                    const std::vector<int64_t>& input_split_sizes) {
  const CollectiveCaller caller = Caller();
  return all_to_all_async(SplitForRanks(caller, output, output_split_sizes),
                          SplitForRanks(caller, input, input_split_sizes));
}

Work ProcessGroup::all_to_all_async(std::vector<at::Tensor> outputs,
                                    std::vector<at::Tensor> inputs) {
  const PreparedCollective prepared = PrepareAllToAllSized(Caller(), outputs, inputs);
  CompareSizes(prepared);
  return Start(prepared, "an all-to-all");
}

// Tells every rank how much each other rank sends to it. Throws where this rank expects another
// size.
void ProcessGroup::CompareSizes(const PreparedCollective& prepared) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  const at::Tensor sizes =
      at::tensor(prepared.collective.input_sizes, options).to(prepared.collective.output.device());
  const at::Tensor sent = at::empty_like(sizes);
  Start(PrepareAllToAll(Caller(), sent, sizes), "the comparison of an all-to-all's sizes").wait();
  const at::Tensor on_host = sent.cpu();
  const int64_t* const counts = on_host.const_data_ptr<int64_t>();
  for (int rank = 0; rank < place_.size; ++rank) {
    const int64_t expected = prepared.collective.output_sizes[rank];
    if (counts[rank] == expected) continue;
    const std::string message =
        absl::StrCat("rank ", place_.rank, ": an all-to-all: rank ", rank, " sends ", counts[rank],
                     " elements to this rank, which receives ", expected);
    communicator_->Retire();
    report_failure(message);
    throw CommunicationError(message);
  }
}

void ProcessGroup::send(at::Tensor tensor, int dst, int tag) {
  send_async(std::move(tensor), dst, tag).wait();
}

void ProcessGroup::recv(at::Tensor tensor, int src, int tag) {
  recv_async(std::move(tensor), src, tag).wait();
}

Work ProcessGroup::send_async(at::Tensor tensor, int dst, int tag) {
  CheckTag(backend_, place_.rank, tag);
  const PreparedCollective prepared = PrepareSend(Caller(), tensor, dst, tag);
  return MakeWork(
      communicator_, place_.rank,
      communicator_->Send(prepared.collective.output, dst, tag, {"a message to rank", dst}),
      prepared);
}

Work ProcessGroup::recv_async(at::Tensor tensor, int src, int tag) {
  CheckTag(backend_, place_.rank, tag);
  const PreparedCollective prepared = PrepareReceive(Caller(), tensor, src, tag);
  return MakeWork(
      communicator_, place_.rank,
      communicator_->Receive(prepared.collective.output, src, tag, {"a message from rank", src},
                             {.finish = prepared.finish, .results = prepared.outputs}),
      prepared);
}

void ProcessGroup::barrier() { communicator_->Barrier(device_); }

Work ProcessGroup::barrier_async() {
  return MakeWork(communicator_, place_.rank, communicator_->StartBarrier(device_, "a barrier"),
                  {});
}

void ProcessGroup::monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks) {
  ThrowIfGone();
  const auto throw_failure = [this] {
    (void)notice_->AwaitFailure(absl::Seconds(1));  // this rank's thread may not have read it yet
    notice_->Throw(notice_->OnWaitEnded("a monitored barrier"));
  };
  if (notice_->failed()) throw_failure();
  StoreMeeting meeting(control_, absl::StrCat("barrier/", incarnation_, "/", barriers_++),
                       place_.rank, place_.size);
  MeetingEnd end;
  try {
    const CollectiveLog::BarrierScope scope(communicator_->log());
    const FailureNotice::EndMeetingOnFailure guard(*notice_, meeting.verdict_key());
    end = AttendMeeting(meeting, "", absl::FromChrono(timeout));
  } catch (const std::exception& error) {
    throw CommunicationError(absl::StrCat(
        "rank ", place_.rank, ": the store failed in a monitored barrier: ", error.what()));
  }
  if (end.verdict == FailureNotice::kFailedVerdict) throw_failure();
  if (end.missing.empty()) return;
  if (!wait_all_ranks) end.missing.resize(1);
  throw CommunicationError(
      absl::StrCat("rank ", place_.rank, ": the monitored barrier failed: ", RankList(end.missing),
                   wait_all_ranks ? "" : " (and perhaps others)", " did not come within ",
                   absl::FormatDuration(absl::FromChrono(timeout))));
}

void ProcessGroup::report_failure(const std::string& reason) {
  notice_->MarkRaised();
  notice_->Report(reason);
}

void ProcessGroup::report_failure_and_throw_later(const std::string& reason) {
  notice_->Report(reason);
}

bool ProcessGroup::failed() const { return notice_->failed(); }

void ProcessGroup::ThrowIfGone() const {
  if (const auto error = notice_->GoneError()) notice_->Throw(*error);
}

void ProcessGroup::ensure_usable() {
  if (!notice_->failed()) return;
  std::optional<internal::GroupError> error;
  switch (notice_->OnForward(&error)) {
    case internal::GroupHealth::Forward::kGoesOn:
      return;
    case internal::GroupHealth::Forward::kRenews:
      return renew();
    case internal::GroupHealth::Forward::kThrows:
      notice_->Throw(*error);
  }
}

void ProcessGroup::renew() {
  ThrowIfGone();
  communicator_->Retire();
  if (!notice_->failed()) notice_->Report("the process group is being renewed");
  std::optional<FailureNotice::Failure> gone;
  try {
    if (place_.size > 1) {
      gone = MeetForRenewal(control_, *notice_,
                            {.rank = place_.rank,
                             .size = place_.size,
                             .incarnation = incarnation_ + 1,
                             .timeout = absl::FromChrono(options_.timeout)});
    }
  } catch (const std::exception& error) {
    throw CommunicationError(absl::StrCat("rank ", place_.rank,
                                          ": the process group could not be renewed, because the ",
                                          "store failed: ", error.what()));
  }
  if (gone.has_value()) {
    notice_->SetGone(*gone);
    ThrowIfGone();
  }
  ++incarnation_;
  barriers_ = 0;
  notice_->Begin(incarnation_);
  try {
    Connect(std::min(options_.timeout(), kReconnectTimeout));
  } catch (const c10::Error& error) {
    report_failure(error.what_without_backtrace());
    throw;
  }
}

std::shared_ptr<ProcessGroup> ProcessGroup::new_group(const std::vector<int>& ranks) {
  std::vector<int> members = ranks;
  std::sort(members.begin(), members.end());
  if (members.empty() || members.front() < 0 || members.back() >= place_.size ||
      std::adjacent_find(members.begin(), members.end()) != members.end()) {
    throw ConfigurationError(absl::StrCat("rank ", place_.rank, ": new_group([",
                                          absl::StrJoin(ranks, ", "), "]) needs different ranks ",
                                          "of 0 to ", place_.size - 1, ", at least one"));
  }
  const auto mine = std::lower_bound(members.begin(), members.end(), place_.rank);
  if (mine == members.end() || *mine != place_.rank) return nullptr;
  // The members agree on the name without communication: by their ranks, and how often these ranks
  // made a group.
  const std::string text = absl::StrJoin(members, ",");
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  const std::string name =
      absl::StrCat("ddp/group/", absl::Hex(hash.high64, absl::kZeroPad16),
                   absl::Hex(hash.low64, absl::kZeroPad16), "/", new_groups_[text]++);
  const int size = static_cast<int>(members.size());
  const bool one_host = place_.local_size == place_.size;
  auto group = std::make_shared<ProcessGroup>(
      Prefixed(name, store_),
      Place{.rank = static_cast<int>(mine - members.begin()),
            .size = size,
            .local_rank = place_.local_rank,
            .local_size = one_host ? size : 0},
      ProcessGroupOptions{.backend = options_.make_backend() == nullptr ? backend_ : std::string(),
                          .make_backend = options_.make_backend,
                          .timeout = options_.timeout});
  group->removes_keys_ = true;
  return group;
}

std::shared_ptr<ProcessGroup> init_process_group(const ProcessGroupOptions& options) {
  const absl::StatusOr<WorkerEnvironment> env = WorkerEnvironment::FromEnvironment();
  if (!env.ok()) throw ConfigurationError(std::string(env.status().message()));
  if (options.expected_world_size >= 0 && options.expected_world_size != env->world_size) {
    throw ConfigurationError(
        absl::StrCat("this program expects a world size of ", options.expected_world_size(),
                     ", but it was started with WORLD_SIZE=", env->world_size));
  }
  ChooseBackend(options);  // before anything is connected
  return std::make_shared<ProcessGroup>(
      ConnectStore(*env, options.timeout),
      ProcessGroup::Place{.rank = env->rank,
                          .size = env->world_size,
                          .local_rank = env->local_rank,
                          .local_size = env->local_world_size,
                          .store_is_rank_0 = env->store_url.empty() && !env->agent_store},
      options);
}

}  // namespace ddp
