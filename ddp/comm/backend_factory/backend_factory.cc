#include "ddp/comm/backend_factory/backend_factory.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_cat.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/backend/nccl_backend.h"
#include "ddp/comm/backend/rank_device.h"
#include "ddp/comm/backend/reduction_support.h"
#include "ddp/comm/hierarchical/hierarchical_backend.h"
#include "ddp/comm/hierarchical/host_meeting.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/shared_memory/shared_memory_backend.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"

namespace ddp::internal {
namespace {

constexpr char kGloo[] = "gloo";
constexpr const char* kShared = kSharedMemoryName;
constexpr const char* kHierarchical = kHierarchicalName;
constexpr char kNccl[] = "nccl";

using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr PartOf(const StorePtr& store, const std::string& name, int64_t incarnation) {
  return c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("ddp/", name, "/", incarnation),
                                                store);
}

at::Device GpuOf(const Membership& membership) {
  const int device = RankDevice(membership.local_rank, VisibleCudaDevices());
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device));
}

// Logs, once in a process, that the rank's device has another number than the rank on its host.
void TellOfRenumberedDevice(const Membership& self, int device) {
  static std::atomic_flag told;
  if (device == self.local_rank || told.test_and_set()) return;
  LOG(INFO) << "rank " << self.rank << " sees " << VisibleCudaDevices()
            << " CUDA devices; local rank " << self.local_rank << " takes device " << device;
}

// Describes a backend by its name and its type, whoever has made it.
ConnectedBackend Describe(c10::intrusive_ptr<c10d::Backend> backend, const std::string& name,
                          at::Device device) {
  BackendTraits traits{.name = name, .has_message_tags = name != kNccl};
  const bool shares = name == kShared || name == kHierarchical;
  if (name == kGloo || name == kNccl || shares) traits.tensor_device = device;
  if (name == kGloo) traits.refusal = &GlooRefusal;
  if (name == kNccl) traits.refusal = &NcclRefusal;
  if (shares) traits.refusal = &SharedMemoryRefusal;
  if (backend && IsGloo(*backend)) AddGlooTraits(traits);
  if (backend && IsSharedMemory(*backend)) AddSharedMemoryTraits(traits);
  if (backend && IsHierarchical(*backend)) AddHierarchicalTraits(traits);
  return {.backend = std::move(backend), .device = device, .traits = std::move(traits)};
}

class GlooFactory : public BackendFactory {
 public:
  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    if (self.size == 1) return Describe(nullptr, kGloo, at::kCPU);
    const StorePtr store = PartOf(site.store, kGloo, self.incarnation);
    auto gloo = MakeGlooBackend(store, {.rank = self.rank,
                                        .size = self.size,
                                        .timeout = site.connect_timeout,
                                        .single_host = AllSeenOnOneHost(store, site)});
    gloo->setTimeout(absl::ToChronoMilliseconds(site.timeout));
    return Describe(std::move(gloo), kGloo, at::kCPU);
  }

  void RemoveKeys(const StorePtr& store, const Membership& membership) override {
    if (membership.size == 1) return;
    for (int64_t incarnation = 0; incarnation <= membership.incarnation; ++incarnation) {
      const StorePtr addresses = PartOf(store, kGloo, incarnation);
      for (const std::string& key : ExchangeHostsKeys(membership.size)) addresses->deleteKey(key);
      for (const std::string& key : GlooKeys(membership.size)) addresses->deleteKey(key);
    }
  }

 private:
  // The launcher's word is not enough: containers of one machine may have networks of their own,
  // and a rank that listens at a loopback address is out of reach for the others.
  static bool AllSeenOnOneHost(const StorePtr& store, const BackendSite& site) {
    const Membership& self = site.membership;
    const auto hosts = ExchangeHosts(*MakeGroupStore(store), self.rank, self.size, HostIdentity(),
                                     site.connect_timeout);
    if (!hosts.ok()) {
      throw CommunicationError(
          absl::StrCat("rank ", self.rank, " of ", self.size,
                       ": Gloo could not connect the ranks: ", hosts.status().message()));
    }
    return std::count(hosts->begin(), hosts->end(), hosts->front()) == self.size;
  }
};

// Shared memory inside hosts, Gloo between them. `falls_back`: to Gloo, where no host has several
// ranks, or the ranks of a host have no memory in common; on all ranks alike.
class HierarchicalFactory : public BackendFactory {
 public:
  HierarchicalFactory(bool falls_back, bool deterministic)
      : falls_back_(falls_back), deterministic_(deterministic) {}

  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    if (self.size == 1) return Describe(nullptr, kHierarchical, at::kCPU);
    const StorePtr store = PartOf(site.store, kHierarchical, self.incarnation);
    auto hosts = FindHosts(*MakeGroupStore(store), self.rank, self.size,
                           {self.local_begin, self.local_end}, site.connect_timeout);
    if (!hosts.ok()) return FallBack(site, hosts.status());
    if (falls_back_ && static_cast<int>(hosts->size()) == self.size) return gloo_.Connect(site);
    if (self.rank == 0) {
      LOG(INFO) << "backend hierarchical: " << self.size << " ranks on " << hosts->size()
                << " hosts; sums are taken in "
                << (deterministic_ ? "one tree over the ranks" : "a tree over the hosts");
    }
    auto backend = MakeHierarchicalBackend(store, {.rank = self.rank,
                                                   .hosts = *std::move(hosts),
                                                   .timeout = site.timeout,
                                                   .connect_timeout = site.connect_timeout,
                                                   .deterministic = deterministic_});
    if (!backend.ok()) return FallBack(site, backend.status());
    return Describe(*std::move(backend), kHierarchical, at::kCPU);
  }

  void RemoveKeys(const StorePtr& store, const Membership& membership) override {
    for (int64_t incarnation = 0; incarnation <= membership.incarnation; ++incarnation) {
      const StorePtr part = PartOf(store, kHierarchical, incarnation);
      for (const std::string& key : HierarchicalKeys(membership.size)) part->deleteKey(key);
    }
    if (falls_back_) gloo_.RemoveKeys(store, membership);
  }

 private:
  ConnectedBackend FallBack(const BackendSite& site, const absl::Status& reason) {
    const std::string about =
        absl::StrCat("rank ", site.membership.rank, " of ", site.membership.size,
                     ": no hierarchy of hosts: ", reason.message());
    if (!falls_back_ || absl::IsDeadlineExceeded(reason)) throw CommunicationError(about);
    // A group whose maker does not know the places of its ranks (Place::local_size 0) is no
    // surprise.
    if (!absl::IsFailedPrecondition(reason)) LOG(WARNING) << about << "; this group uses Gloo";
    return gloo_.Connect(site);
  }

  const bool falls_back_;
  const bool deterministic_;
  GlooFactory gloo_;
};

// Shared memory, for ranks of one host. `falls_back`: to the hierarchy for several hosts, and to
// Gloo where the ranks have no memory in common; on all ranks alike.
class SharedMemoryFactory : public BackendFactory {
 public:
  SharedMemoryFactory(bool falls_back, bool deterministic)
      : falls_back_(falls_back), hierarchy_(/*falls_back=*/true, deterministic) {}

  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    if (self.size == 1) return Describe(nullptr, kShared, at::kCPU);
    if (!self.IsOneHost()) {
      if (falls_back_) return hierarchy_.Connect(site);
      throw ConfigurationError(
          absl::StrCat("rank ", self.rank, " of ", self.size,
                       ": backend \"shm\" is for ranks of one host, and this group has several"));
    }
    auto shared = MakeSharedMemoryBackend(PartOf(site.store, kShared, self.incarnation),
                                          {.rank = self.rank,
                                           .size = self.size,
                                           .timeout = site.timeout,
                                           .connect_timeout = site.connect_timeout});
    if (shared.ok()) return Describe(*std::move(shared), kShared, at::kCPU);
    const std::string about =
        absl::StrCat("rank ", self.rank, " of ", self.size,
                     ": the ranks share no memory: ", shared.status().message());
    if (!falls_back_ || absl::IsDeadlineExceeded(shared.status())) throw CommunicationError(about);
    LOG(WARNING) << about << "; this group uses Gloo";
    return gloo_.Connect(site);
  }

  void RemoveKeys(const StorePtr& store, const Membership& membership) override {
    for (int64_t incarnation = 0; incarnation <= membership.incarnation; ++incarnation) {
      const StorePtr keys = PartOf(store, kShared, incarnation);
      for (const std::string& key : SharedMemoryKeys()) keys->deleteKey(key);
    }
    if (!falls_back_) return;
    if (membership.IsOneHost()) {
      gloo_.RemoveKeys(store, membership);
    } else {
      hierarchy_.RemoveKeys(store, membership);
    }
  }

 private:
  const bool falls_back_;
  HierarchicalFactory hierarchy_;
  GlooFactory gloo_;
};

class NcclFactory : public BackendFactory {
 public:
  explicit NcclFactory(bool legacy) : legacy_(legacy) {}

  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    const at::Device gpu = GpuOf(self);
    TellOfRenumberedDevice(self, gpu.index());
    auto nccl = MakeNcclBackend(PartOf(site.store, kNccl, self.incarnation),
                                {.rank = self.rank,
                                 .size = self.size,
                                 .device = gpu.index(),
                                 .timeout = site.timeout,
                                 .connect_timeout = site.connect_timeout,
                                 .legacy = legacy_});
    return Describe(std::move(nccl), kNccl, gpu);
  }

 private:
  const bool legacy_;
};

class OwnFactory : public BackendFactory {
 public:
  explicit OwnFactory(OwnBackendMaker make) : make_(std::move(make)) {}

  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    BackendSite own_site = site;
    own_site.store = PartOf(site.store, "own", self.incarnation);
    c10::intrusive_ptr<c10d::Backend> own = make_(own_site);
    if (!own || own->getRank() != self.rank || own->getSize() != self.size) {
      throw ConfigurationError(absl::StrCat(
          "rank ", self.rank, " of ", self.size, ": make_backend returned ",
          own ? absl::StrCat("a backend of rank ", own->getRank(), " of ", own->getSize())
              : std::string("no backend")));
    }
    const std::string name = own->getBackendName();
    const std::optional<at::Device> bound = own->getBoundDeviceId();
    const at::Device unbound = name == kNccl ? GpuOf(self) : at::Device(at::kCPU);
    return Describe(std::move(own), name, bound.value_or(unbound));
  }

 private:
  const OwnBackendMaker make_;
};

}  // namespace

std::shared_ptr<BackendFactory> MakeGlooFactory() { return std::make_shared<GlooFactory>(); }

std::shared_ptr<BackendFactory> MakeSharedMemoryFactory(bool falls_back, bool deterministic) {
  return std::make_shared<SharedMemoryFactory>(falls_back, deterministic);
}

std::shared_ptr<BackendFactory> MakeHierarchicalFactory(bool deterministic) {
  return std::make_shared<HierarchicalFactory>(/*falls_back=*/false, deterministic);
}

std::shared_ptr<BackendFactory> MakeNcclFactory(bool legacy) {
  return std::make_shared<NcclFactory>(legacy);
}

std::shared_ptr<BackendFactory> MakeOwnFactory(OwnBackendMaker make) {
  return std::make_shared<OwnFactory>(std::move(make));
}

std::shared_ptr<BackendFactory> MakeFactoryOf(const std::string& name, bool deterministic) {
  if (name.empty()) {
    return VisibleCudaDevices() > 0 ? MakeNcclFactory(/*legacy=*/false)
                                    : MakeSharedMemoryFactory(/*falls_back=*/true, deterministic);
  }
  if (name == kShared) return MakeSharedMemoryFactory(/*falls_back=*/false, deterministic);
  if (name == kHierarchical) return MakeHierarchicalFactory(deterministic);
  if (name == kGloo) return MakeGlooFactory();
  if (name == kNccl) return MakeNcclFactory(/*legacy=*/false);
  if (name == "nccl-legacy") return MakeNcclFactory(/*legacy=*/true);
  throw ConfigurationError(
      absl::StrCat("backend \"", name,
                   "\" is unknown; there are shm, hierarchical, gloo, nccl and nccl-legacy"));
}

}  // namespace ddp::internal
