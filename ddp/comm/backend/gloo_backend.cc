// The only file that includes ProcessGroupGloo.hpp. Gloo's headers here are our own stand-ins, so
// no inline function compiled from them may be visible outside (see the target's copts).
#include "ddp/comm/backend/gloo_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/broken_pipes.h"
#include "base/mutex.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/meeting/store_meeting.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"

namespace ddp::internal {
namespace {

// Gives access to the protected counter from which an operation of LibTorch takes its tag.
struct GlooCounter : c10d::ProcessGroupGloo {
  static constexpr uint32_t c10d::ProcessGroupGloo::*kMember = &GlooCounter::collectiveCounter_;
};

// Gives access to the collectives that the threads of LibTorch are at.
struct GlooThreads : c10d::ProcessGroupGloo {
  static constexpr auto kMutex = &GlooThreads::workMutex_;
  static constexpr auto kQueued = &GlooThreads::workQueue_;
  static constexpr auto kInProgress = &GlooThreads::workInProgress_;
};

// Adds the network devices to `options`.
void AddDevices(const GlooBackendOptions& from, c10d::ProcessGroupGloo::Options& options) {
  using Gloo = c10d::ProcessGroupGloo;
  const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr && *interface != '\0') {
    for (const auto name : absl::StrSplit(interface, ',', absl::SkipWhitespace())) {
      options.devices.push_back(Gloo::createDeviceForInterface(std::string(name)));
    }
  } else if (from.single_host) {
    options.devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  } else {
    options.devices.push_back(Gloo::createDefaultDevice());
  }
}

// Logs the warning once in a process: every group of it has the same Gloo.
void WarnOfUnsafeGloo(const GlooBackendOptions& options) {
  if (options.rank != 0 || options.single_host) return;
  static std::atomic_flag told;
  if (told.test_and_set()) return;
  const std::string warning =
      UnsafeGlooWarning(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, TORCH_VERSION_PATCH);
  if (!warning.empty()) LOG(WARNING) << warning;
}

// Gloo ends the process when an operation receives more bytes than it expects. Operations with
// different tags receive nothing from each other. Without a call, Gloo uses a running number.
void SetNextTag(c10d::Backend& backend, uint32_t tag) {
  static_cast<c10d::ProcessGroupGloo&>(backend).*GlooCounter::kMember = tag;
}

// A thread of LibTorch completes a collective, writes its name into a string that all threads
// of the backend share, without a lock, and then takes the collective off its list. Two writes at
// once of a name that does not fit into the string itself, such as that of a sparse all-reduce,
// corrupt the heap. See BackendTraits::settled.
bool ThreadsAreIdle(c10d::Backend& backend) {
  auto& gloo = static_cast<c10d::ProcessGroupGloo&>(backend);
  const std::lock_guard<std::mutex> lock(gloo.*GlooThreads::kMutex);
  const auto& list = gloo.*GlooThreads::kInProgress;
  return (gloo.*GlooThreads::kQueued).empty() &&
         std::all_of(list.begin(), list.end(), [](const auto& work) { return work == nullptr; });
}

constexpr char kConnected[] = "connected";

}  // namespace

std::vector<std::string> GlooKeys(int size) {
  std::vector<std::string> keys = StoreMeeting::Keys(kConnected, size);
  // The names that LibTorch's Gloo gives the addresses.
  for (int rank = 0; rank < size; ++rank) keys.push_back(absl::StrCat("0/", rank));
  return keys;
}

c10::intrusive_ptr<c10d::Backend> MakeGlooBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const GlooBackendOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  IgnoreBrokenPipes();
  WarnOfUnsafeGloo(options);
  StoreMeeting meeting(MakeGroupStore(store), kConnected,
                       {.rank = options.rank, .size = options.size});
  std::string reason;
  try {
    auto gloo = Gloo::Options::create(absl::ToChronoMilliseconds(options.timeout));
    AddDevices(options, *gloo);
    auto backend = c10::make_intrusive<Gloo>(store, options.rank, options.size, gloo);
    // A rank may be connected with a peer that is not yet connected with it, and would fail when
    // this rank left.
    const MeetingEnd end = AttendMeeting(meeting, "", options.timeout);
    if (end.verdict == StoreMeeting::kMet) return backend;
    if (end.missing.empty()) throw CommunicationError(end.verdict);  // another rank's error
    reason = absl::StrCat("rank ", end.missing.front(), " has not come");
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    reason = MessageOf(error);
  }
  reason = absl::StrCat("rank ", options.rank, " of ", options.size,
                        ": Gloo could not connect the ranks: ", reason);
  try {
    meeting.Decide(reason);
  } catch (const std::exception&) {
    // Without a store the others learn nothing, and their wait fails too.
  }
  throw CommunicationError(reason);
}

std::string UnsafeGlooWarning(int major, int minor, int patch) {
  if (std::tuple(major, minor, patch) >= std::tuple(2, 14, 1)) return "";
  return absl::StrCat("LibTorch ", major, ".", minor, ".", patch,
                      "'s Gloo lets any peer that reaches its port write to this process's memory "
                      "(gloo issue 509); build with LibTorch 2.14.1 or newer, or keep the network "
                      "between the hosts closed to others");
}

bool IsGloo(const c10d::Backend& backend) {
  return dynamic_cast<const c10d::ProcessGroupGloo*>(&backend) != nullptr;
}

// LibTorch writes down every collective in a table of the process, and adds a new group to it
// without a lock: threads that use different groups would corrupt the table.
Mutex* GlooLaunchMutex() {
  static auto* const mutex = new Mutex();
  return mutex;
}

// A message that is late makes Gloo close all connections of its device, and fail what uses them.
// So one that no rank sends ends the operations. LibTorch chooses the device by the tag.
void EndGlooOperations(c10d::Backend& backend) {
  constexpr int kUnusedTag = 0x7fff0000;
  auto& gloo = static_cast<c10d::ProcessGroupGloo&>(backend);
  const int peer = (gloo.getRank() + 1) % gloo.getSize();
  const int devices = static_cast<int>(gloo.getOptions()->devices.size());
  for (int device = 0; device < devices; ++device) {
    std::vector<at::Tensor> tensors = {at::empty({1}, at::kByte)};
    try {
      c10::intrusive_ptr<c10d::Work> late;
      {
        MutexLock lock(*GlooLaunchMutex());
        late = gloo.recv(tensors, peer, kUnusedTag + device);
      }
      late->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {  // as it should, or the connections are closed already
    }
  }
}

void AddGlooTraits(BackendTraits& traits) {
  traits.set_tag = &SetNextTag;
  traits.end_operations = &EndGlooOperations;
  traits.launch_mutex = GlooLaunchMutex();
  traits.settled = &ThreadsAreIdle;
}

}  // namespace ddp::internal
