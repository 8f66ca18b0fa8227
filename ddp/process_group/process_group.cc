// Length: one short method for each form of each collective. Their work is done in ddp/comm/.

#include "ddp/process_group.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/mutex.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/backend_factory/backend_factory.h"
#include "ddp/comm/check/collective_check.h"
#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/debug_level.h"
#include "ddp/comm/group_error.h"
#include "ddp/comm/hierarchical/host_meeting.h"
#include "ddp/comm/meeting/attempt_name.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/comm/meeting/store_meeting.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/comm/reports/renewal.h"
#include "ddp/comm/work_future.h"
#include "ddp/common/error.h"
#include "ddp/common/keep_forever.h"
#include "ddp/common/membership.h"
#include "ddp/common/name_list.h"
#include "ddp/common/worker_environment.h"
#include "ddp/health/group_failure.h"
#include "ddp/health/group_health.h"
#include "ddp/process_group/work_state.h"
#include "ddp/register_backend.h"
#include "ddp/transfer/collective_arguments.h"
#include "store/redis_store/redis_store.h"
#include "xxhash.h"

namespace ddp {
namespace {

using namespace internal;  // NOLINT: most of what this file puts together

constexpr char kControlPrefix[] = "ddp/control";

// The time for which a lost store may delay a failure report, or the end of a group.
constexpr std::chrono::milliseconds kReportTimeout{5000};

// The time limit of connecting again. All ranks were connected a moment ago, so connecting is fast,
// or a rank has died.
constexpr std::chrono::milliseconds kReconnectTimeout{60000};

c10::intrusive_ptr<c10d::Store> Prefixed(const std::string& prefix,
                                         const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// The program's own backends by name.
struct OwnBackends {
  Mutex mutex;
  std::map<std::string, BackendMaker> makers ABSL_GUARDED_BY(mutex);
};
OwnBackends& Registered() {
  static auto& backends = *new OwnBackends;
  return backends;
}

std::shared_ptr<BackendFactory> MakeFactoryWith(const BackendMaker& maker) {
  return MakeOwnFactory([maker](const BackendSite& site) {
    return maker({.store = site.store,
                  .rank = site.membership.rank,
                  .size = site.membership.size,
                  .local_rank = site.membership.local_rank,
                  .incarnation = site.membership.incarnation,
                  .timeout = absl::ToChronoMilliseconds(site.timeout),
                  .connect_timeout = absl::ToChronoMilliseconds(site.connect_timeout)});
  });
}

// Throws ConfigurationError when the options contradict each other, or name an unknown backend.
std::shared_ptr<BackendFactory> ChooseFactory(const ProcessGroupOptions& options) {
  std::string wanted = options.backend;
  if (options.make_backend != nullptr) {
    if (wanted.empty()) return MakeFactoryWith(options.make_backend);
    throw ConfigurationError(absl::StrCat("the options name a backend, \"", wanted,
                                          "\", and make one (make_backend); choose one of them"));
  }
  if (wanted.empty()) wanted = EnvironmentVariable("DDP_BACKEND").value_or("");
  {
    MutexLock lock(Registered().mutex);
    const auto own = Registered().makers.find(wanted);
    if (own != Registered().makers.end()) return MakeFactoryWith(own->second);
  }
  return MakeFactoryOf(wanted, options.deterministic);
}

Membership FirstMembership(const ProcessGroup::Place& place) {
  Membership first{.rank = place.rank,
                   .size = place.size,
                   .local_rank = place.local_rank,
                   .store_is_rank_0 = place.store_is_rank_0};
  if (place.local_first < 0) {
    first.SetLocalRanks(place.local_size);
  } else if (place.local_first + place.local_size <= place.size) {
    first.local_begin = place.local_first;
    first.local_end = place.local_first + place.local_size;
  }
  return first;
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

// Returns the part of torchrun's store for this attempt. The store is the agent's: it has the keys
// of the attempts before a restart too.
c10::intrusive_ptr<c10d::Store> PartForAttempt(const WorkerEnvironment& env,
                                               const c10::intrusive_ptr<c10d::Store>& store,
                                               std::chrono::milliseconds timeout) {
  const absl::StatusOr<std::string> name = AgreeOnAttempt(
      *MakeGroupStore(Prefixed("ddp", store)), env.rank, env.world_size, absl::FromChrono(timeout));
  if (!name.ok()) throw CommunicationError(std::string(name.status().message()));
  return Prefixed(absl::StrCat("ddp/attempt/", *name), store);
}

std::string StoreLocation(const WorkerEnvironment& env) {
  return env.store_url.empty() ? absl::StrCat(env.master_addr, ":", env.master_port)
                               : env.store_url;
}

c10::intrusive_ptr<c10d::Store> ConnectStore(const WorkerEnvironment& env,
                                             std::chrono::milliseconds timeout) {
  const std::string where = StoreLocation(env);
  try {
    if (env.store_url.empty()) {
      const c10::intrusive_ptr<c10d::Store> store = TorchrunStore(env, timeout);
      return env.agent_store ? PartForAttempt(env, store, timeout) : store;
    }
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

// The record of a store at one location, which this process keeps until it ends.
struct KnownStore {
  std::atomic<int> groups = 0;  // that this process has connected
  // The first connection, where this process serves the store. The server ends with the last
  // connection of its process: without this one, a rank that is early with its next group would
  // connect to the server of the group before, which then ends.
  c10::intrusive_ptr<c10d::Store> first;
};

KnownStore& KnownStoreAt(const std::string& location) {
  static Mutex mutex;
  static auto* const known = new std::map<std::string, KnownStore>;
  MutexLock lock(mutex);
  return (*known)[location];
}

// Returns the part of `store` for a group after `earlier` groups of this process. The first group
// has the store itself. A later group has a prefix with its number, because it would take the keys
// of an earlier group for its own. All ranks connect their groups in the same order, so the numbers
// agree without communication. A restarted process begins with the first group again, in the fresh
// store of its generation.
c10::intrusive_ptr<c10d::Store> PartForGroup(const c10::intrusive_ptr<c10d::Store>& store,
                                             int earlier) {
  if (earlier == 0) return store;
  return Prefixed(absl::StrCat("ddp/init/", earlier + 1), store);
}

// Returns the place of this rank. Where the launcher does not say which ranks stand on one host, as
// mpirun and schedulers, the ranks find it out in `store`.
ProcessGroup::Place PlaceFrom(const WorkerEnvironment& env,
                              const c10::intrusive_ptr<c10d::Store>& store,
                              std::chrono::milliseconds timeout) {
  ProcessGroup::Place place{.rank = env.rank,
                            .size = env.world_size,
                            .local_rank = env.local_rank,
                            .local_size = env.local_world_size};
  if (env.local_world_size > 0) return place;
  const auto hosts = ExchangeHosts(*MakeGroupStore(Prefixed("ddp/hosts", store)), env.rank,
                                   env.world_size, HostIdentity(), absl::FromChrono(timeout));
  if (!hosts.ok()) {
    throw CommunicationError(
        absl::StrCat("rank ", env.rank, " of ", env.world_size,
                     ": the hosts of the ranks are unknown: ", hosts.status().message()));
  }
  const HostPlace found = HostPlaceOf(*hosts, env.rank);
  if (!env.has_local_rank) place.local_rank = found.local_rank;
  place.local_size = found.local.size();
  if (place.local_size > 0) place.local_first = found.local.begin;
  return place;
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

}  // namespace

// The parts of a group that renew() replaces.
struct ProcessGroup::Incarnation {
  Membership membership;
  at::Device device{at::kCPU};
  BackendTraits traits = {};
  std::shared_ptr<Communicator> communicator = nullptr;
  int64_t barriers = 0;        // monitored barriers so far
  pid_t process = ::getpid();  // that made the group; a child of fork() is another one
};

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
  if (!options.backend.empty() || options.make_backend != nullptr) {
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
                           const ProcessGroupOptions& options)
    : options_(options),
      store_(std::move(store)),
      control_(MakeGroupStore(Prefixed(kControlPrefix, store_))),
      factory_(ChooseFactory(options)),
      now_(new Incarnation{.membership = FirstMembership(place)}),
      world_ranks_(place.size),
      exceptions_at_start_(std::uncaught_exceptions()) {
  if (!DebugLevelFromEnvironment().ok()) {
    throw ConfigurationError(absl::StrCat(
        "rank ", place.rank, ": ", std::string(DebugLevelFromEnvironment().status().message())));
  }
  std::iota(world_ranks_.begin(), world_ranks_.end(), 0);
  // The monitor has a timeout and, where possible, a connection of its own. Waits in some stores (a
  // TCPStore) block other users of the connection, and a failure report must not wait for them.
  const c10::intrusive_ptr<c10d::Store> watched = store_->clone();
  const bool own =
      watched.get() != store_.get();  // false for a HashStore, which has no connections
  FailureMonitor::Options reports;
  if (own) reports.command_timeout = absl::FromChrono(std::min(options.timeout, kReportTimeout));
  monitor_ = std::make_shared<FailureMonitor>(MakeGroupStore(Prefixed(kControlPrefix, watched)),
                                              now_->membership, std::move(reports));
  Connect(options.timeout);
}

void ProcessGroup::Connect(std::chrono::milliseconds connect_timeout) {
  const absl::Duration timeout = absl::FromChrono(options_.timeout);
  Communicator::Options options{
      .membership = now_->membership, .timeout = timeout, .traits = now_->traits};
  try {
    ConnectedBackend connected =
        factory_->Connect({.store = store_,
                           .membership = now_->membership,
                           .timeout = timeout,
                           .connect_timeout = absl::FromChrono(connect_timeout)});
    now_->device = connected.device;
    now_->traits = options.traits = std::move(connected.traits);
    std::unique_ptr<CollectiveCheck> check;
    if (CurrentDebugLevel() == DebugLevel::kDetail && now_->membership.size > 1) {
      check = std::make_unique<CollectiveCheck>(control_, monitor_, now_->membership, timeout);
    }
    now_->communicator = std::make_shared<Communicator>(std::move(connected.backend), monitor_,
                                                        options, std::move(check));
  } catch (const std::exception& error) {
    now_->communicator = std::make_shared<Communicator>(nullptr, monitor_, options);
    const auto* const of_store = dynamic_cast<const c10::DistError*>(&error);
    if (of_store == nullptr || dynamic_cast<const CommunicationError*>(&error) != nullptr) throw;
    throw CommunicationError(absl::StrCat("rank ", rank(), " of ", size(),
                                          ": the store failed while the ranks ",
                                          "connected: ", of_store->what_without_backtrace()));
  }
}

ProcessGroup::~ProcessGroup() {
  // A child of fork() has none of the group's threads, and shares the connections with its parent.
  // An end of the group in the child would tell the peers that the parent has left, and would wait
  // for threads that do not exist. So the child neither ends nor writes anything.
  if (now_->process != ::getpid()) {
    KeepForever(std::tuple(store_, control_, factory_, std::move(monitor_), std::move(now_)));
    return;
  }
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    report_failure(absl::StrCat("an exception ended the program of rank ", rank(),
                                "; its own output says which"));
  }
  monitor_->Leave();  // before the connections close
  now_->communicator.reset();
  if (!removes_keys_) return;
  monitor_->log().writes().Run([this] { RemoveKeys(); });
  monitor_->log().writes().Flush();
}

// The last rank to leave removes the keys that all ranks may need until then. After a failure some
// keys stay, because a rank that died does not leave.
void ProcessGroup::RemoveKeys() {
  const Membership& self = now_->membership;
  try {
    if (control_->Add("left", 1) < self.size) return;
    control_->Delete("left");
    for (int peer = 0; peer < self.size; ++peer) control_->Delete(ReportLog::StandingKey(peer));
    control_->Delete(StoreMeeting::VerdictKey(ReportLog::RenewalName(self.incarnation + 1)));
    factory_->RemoveKeys(store_, self);
  } catch (const std::exception&) {
    // Without a store there is nothing to remove; the monitor has logged it.
  }
}

int ProcessGroup::rank() const { return now_->membership.rank; }

int ProcessGroup::size() const { return now_->membership.size; }

int64_t ProcessGroup::incarnation() const { return now_->membership.incarnation; }

const std::string& ProcessGroup::backend() const { return now_->traits.name; }

at::Device ProcessGroup::device() const { return now_->device; }

at::Tensor ProcessGroup::to_host(const at::Tensor& tensor) {
  return communicator().ToHost(tensor, "a copy of a result to the host");
}

Communicator& ProcessGroup::communicator() { return *now_->communicator; }

CollectiveCaller ProcessGroup::Caller() const {
  return {.rank = rank(),
          .size = size(),
          .device = now_->traits.tensor_device,
          .refusal = now_->traits.refusal};
}

void ProcessGroup::CheckTag(int tag) const {
  if (now_->traits.has_message_tags || tag == 0) return;
  throw ConfigurationError(absl::StrCat("rank ", rank(), ": a message has tag ", tag, ", and ",
                                        absl::AsciiStrToUpper(now_->traits.name),
                                        " has no tags: its messages arrive in order"));
}

Work ProcessGroup::Start(const PreparedCollective& prepared, const char* what, int64_t index) {
  MarkWritten(prepared, rank());
  Communicator::Pending pending =
      now_->communicator->Start(prepared.collective, OperationName(what, index),
                                {.finish = prepared.finish, .results = prepared.outputs});
  return MakeWork(now_->communicator, rank(), std::move(pending), prepared);
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
  const at::Tensor on_host = to_host(sent);
  const int64_t* const counts = on_host.const_data_ptr<int64_t>();
  for (int peer = 0; peer < size(); ++peer) {
    const int64_t expected = prepared.collective.output_sizes[peer];
    if (counts[peer] == expected) continue;
    const std::string message =
        absl::StrCat("rank ", rank(), ": an all-to-all: rank ", peer, " sends ", counts[peer],
                     " elements to this rank, which receives ", expected);
    now_->communicator->Retire();
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
  CheckTag(tag);
  const PreparedCollective prepared = PrepareSend(Caller(), tensor, dst, tag);
  return MakeWork(
      now_->communicator, rank(),
      now_->communicator->Send(prepared.collective.output, dst, tag, {"a message to rank", dst}),
      prepared);
}

Work ProcessGroup::recv_async(at::Tensor tensor, int src, int tag) {
  CheckTag(tag);
  const PreparedCollective prepared = PrepareReceive(Caller(), tensor, src, tag);
  MarkWritten(prepared, rank());
  return MakeWork(now_->communicator, rank(),
                  now_->communicator->Receive(
                      prepared.collective.output, src, tag, {"a message from rank", src},
                      {.finish = prepared.finish, .results = prepared.outputs}),
                  prepared);
}

void ProcessGroup::barrier() { now_->communicator->Barrier(now_->device); }

Work ProcessGroup::barrier_async() {
  return MakeWork(now_->communicator, rank(),
                  now_->communicator->StartBarrier(now_->device, "a barrier"), {});
}

void ProcessGroup::monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks) {
  ThrowIfGone();
  const auto throw_failure = [this] {
    (void)monitor_->AwaitFailure(absl::Seconds(1));  // this rank's thread may not have read it yet
    ThrowGroupError(*monitor_, monitor_->Health([](auto& health) {
      return health.OnWaitEnded("a monitored barrier");
    }));
  };
  if (monitor_->failed()) throw_failure();
  StoreMeeting meeting(control_, absl::StrCat("barrier/", incarnation(), "/", now_->barriers++),
                       now_->membership);
  std::optional<MeetingEnd> end;
  try {
    if (CollectiveLog* const log = now_->communicator->log()) {
      log->Add({.operation = "monitored barrier", .what = "a monitored barrier"});
    }
    end = monitor_->Attend(meeting, "", absl::FromChrono(timeout));
  } catch (const std::exception& error) {
    throw CommunicationError(
        absl::StrCat("rank ", rank(), ": the store failed in a monitored barrier: ", error.what()));
  }
  if (!end.has_value()) throw_failure();
  if (end->missing.empty()) return;
  if (!wait_all_ranks) end->missing.resize(1);
  throw CommunicationError(
      absl::StrCat("rank ", rank(), ": the monitored barrier failed: ", RankList(end->missing),
                   wait_all_ranks ? "" : " (and perhaps others)", " did not come within ",
                   absl::FormatDuration(absl::FromChrono(timeout))));
}

void ProcessGroup::report_failure(const std::string& reason) {
  monitor_->Health([](auto& health) { return health.Raise(); });
  monitor_->Report(reason);
}

void ProcessGroup::report_failure_to(const std::vector<ProcessGroup*>& groups,
                                     const std::string& reason) {
  const auto failed = std::find_if(groups.begin(), groups.end(),
                                   [](const ProcessGroup* group) { return group->failed(); });
  for (ProcessGroup* const group : groups) {
    if (failed == groups.end() || group == *failed) {
      group->report_failure(reason);
    } else {
      group->PassOn(**failed, reason);
    }
  }
}

// Reports the failure of another group to the ranks of this one, or else `reason`.
void ProcessGroup::PassOn(const ProcessGroup& failed, const std::string& reason) {
  const std::optional<GroupFailure> failure = failed.monitor_->failure();
  if (!failure.has_value() || failed.world_ != world_) return report_failure(reason);
  GroupFailure found{.rank = -1, .reason = failure->reason};
  if (failure->rank >= 0) {
    const int rank_at_fault = failed.world_ranks_[failure->rank];
    const auto member = std::find(world_ranks_.begin(), world_ranks_.end(), rank_at_fault);
    if (member != world_ranks_.end()) {
      found.rank = static_cast<int>(member - world_ranks_.begin());
    } else {
      found.reason = absl::StrCat("rank ", rank_at_fault, ", which is not in this process group, ",
                                  "failed: ", failure->reason);
    }
  }
  monitor_->Health([](auto& health) { return health.Raise(); });
  monitor_->ReportFound(found);
}

void ProcessGroup::report_failure_and_throw_later(const std::string& reason) {
  monitor_->Report(reason);
}

bool ProcessGroup::failed() const { return monitor_->failed(); }

void ProcessGroup::ThrowIfGone() const {
  const auto error = monitor_->Health([](auto& health) { return health.GoneError(); });
  if (error.has_value()) ThrowGroupError(*monitor_, *error);
}

void ProcessGroup::ensure_usable() {
  if (!monitor_->failed()) return;
  std::optional<internal::GroupError> error;
  switch (monitor_->Health([&](auto& health) { return health.OnForward(&error); })) {
    case internal::GroupHealth::Forward::kGoesOn:
      return;
    case internal::GroupHealth::Forward::kRenews:
      return renew();
    case internal::GroupHealth::Forward::kThrows:
      ThrowGroupError(*monitor_, *error);
  }
}

void ProcessGroup::renew() {
  ThrowIfGone();
  if (!monitor_->failed()) monitor_->Report("the process group is being renewed");
  now_->communicator->RetireForNext();
  const Membership next = now_->membership.Next();
  std::optional<GroupFailure> gone;
  try {
    if (next.size > 1) {
      gone = MeetForRenewal(control_, monitor_->log(), next, absl::FromChrono(options_.timeout));
    }
  } catch (const std::exception& error) {
    throw CommunicationError(absl::StrCat("rank ", rank(),
                                          ": the process group could not be renewed, because the ",
                                          "store failed: ", error.what()));
  }
  if (gone.has_value()) {
    monitor_->Health([&](auto& health) { health.OnGone(*gone); });
    ThrowIfGone();
  }
  monitor_->Begin(next);
  // The names stay those of the last incarnation until the ranks have connected.
  now_.reset(new Incarnation{.membership = next,
                             .device = now_->device,
                             .traits = std::move(now_->traits),
                             .process = now_->process});
  try {
    Connect(std::min(options_.timeout, kReconnectTimeout));
  } catch (const c10::Error& error) {
    report_failure(error.what_without_backtrace());
    throw;
  }
}

std::shared_ptr<ProcessGroup> ProcessGroup::new_group(const std::vector<int>& ranks) {
  std::vector<int> members = ranks;
  std::sort(members.begin(), members.end());
  if (members.empty() || members.front() < 0 || members.back() >= size() ||
      std::adjacent_find(members.begin(), members.end()) != members.end()) {
    throw ConfigurationError(absl::StrCat("rank ", rank(), ": new_group([",
                                          absl::StrJoin(ranks, ", "), "]) needs different ranks ",
                                          "of 0 to ", size() - 1, ", at least one"));
  }
  const auto mine = std::lower_bound(members.begin(), members.end(), rank());
  if (mine == members.end() || *mine != rank()) return nullptr;
  // The members agree on the name without communication: by their ranks, and how often these ranks
  // made a group.
  const std::string text = absl::StrJoin(members, ",");
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  const std::string name =
      absl::StrCat("ddp/group/", absl::Hex(hash.high64, absl::kZeroPad16),
                   absl::Hex(hash.low64, absl::kZeroPad16), "/", new_groups_[text]++);
  const int size = static_cast<int>(members.size());
  // The ranks of a host follow each other in this group, and so its members do in the new one.
  const Membership& self = now_->membership;
  const auto first = std::lower_bound(members.begin(), members.end(), self.local_begin);
  const auto end = std::lower_bound(first, members.end(), self.local_end);
  auto group = std::make_shared<ProcessGroup>(
      Prefixed(name, store_),
      Place{.rank = static_cast<int>(mine - members.begin()),
            .size = size,
            .local_rank = self.local_rank,
            .local_size = static_cast<int>(end - first),
            .local_first = static_cast<int>(first - members.begin())},
      ProcessGroupOptions{.backend = options_.backend,
                          .deterministic = options_.deterministic,
                          .make_backend = options_.make_backend,
                          .timeout = options_.timeout});
  group->removes_keys_ = true;
  group->world_ = world_;
  for (int i = 0; i < size; ++i) group->world_ranks_[i] = world_ranks_[members[i]];
  return group;
}

void register_backend(const std::string& name, BackendMaker maker) {
  if (name.empty() || maker == nullptr) {
    throw ConfigurationError("register_backend() needs a name and a function");
  }
  MutexLock lock(Registered().mutex);
  if (!Registered().makers.emplace(name, std::move(maker)).second) {
    throw ConfigurationError(absl::StrCat("the backend \"", name, "\" is registered already"));
  }
}

std::shared_ptr<ProcessGroup> init_process_group(const ProcessGroupOptions& options) {
  const absl::StatusOr<WorkerEnvironment> env = WorkerEnvironment::FromEnvironment();
  if (!env.ok()) throw ConfigurationError(std::string(env.status().message()));
  if (options.expected_world_size >= 0 && options.expected_world_size != env->world_size) {
    throw ConfigurationError(
        absl::StrCat("this program expects a world size of ", options.expected_world_size,
                     ", but it was started with WORLD_SIZE=", env->world_size));
  }
  (void)ChooseFactory(options);  // before anything is connected
  const c10::intrusive_ptr<c10d::Store> store = ConnectStore(*env, options.timeout);
  KnownStore& known = KnownStoreAt(StoreLocation(*env));
  const bool store_is_rank_0 = env->store_url.empty() && !env->agent_store;
  if (store_is_rank_0 && env->rank == 0 && known.first == nullptr) known.first = store;
  const c10::intrusive_ptr<c10d::Store> part = PartForGroup(store, known.groups);
  ProcessGroup::Place place = PlaceFrom(*env, part, options.timeout);
  place.store_is_rank_0 = store_is_rank_0;
  auto group = std::make_shared<ProcessGroup>(part, place, options);
  ++known.groups;  // not after a throw: a repeated call uses the part in which its peers may wait
  return group;
}

bool all_agree(const std::shared_ptr<ProcessGroup>& group, bool ok) {
  const at::Tensor all =
      at::full({1}, ok ? 1 : 0, at::TensorOptions(group->device()).dtype(at::kInt));
  group->all_reduce(all, ReduceOp::kMin);
  return group->to_host(all).item<int32_t>() == 1;
}

}  // namespace ddp
