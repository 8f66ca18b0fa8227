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
#include "ddp/comm/engine_backend/engine_backend.h"
#include "ddp/comm/hierarchical/host_meeting.h"
#include "ddp/comm/meeting/c10d_group_store.h"
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

// Removes the keys of a backend's part of the store, in all incarnations.
void RemoveFrom(const StorePtr& store, const std::string& name, const Membership& membership,
                const std::vector<std::vector<std::string>>& lists) {
  for (int64_t incarnation = 0; incarnation <= membership.incarnation; ++incarnation) {
    const StorePtr part = PartOf(store, name, incarnation);
    for (const auto& keys : lists) {
      for (const std::string& key : keys) part->deleteKey(key);
    }
  }
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
  if (backend && IsEngineBackend(*backend)) {
    AddEngineTraits(traits);
    traits.all_see_dead_rank = OneHostGroupOf(*backend) != nullptr;
  }
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
    RemoveFrom(store, kGloo, membership, {HostsKeys(membership.size), GlooKeys(membership.size)});
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

// Shared memory inside hosts, Gloo between them. `name`: of the backend; "" is shm for one host and
// hierarchical for several, with Gloo where no host has several ranks, or the ranks of a host have
// no memory in common; on all ranks alike.
class EngineFactory : public BackendFactory {
 public:
  EngineFactory(std::string name, bool deterministic)
      : name_(std::move(name)), deterministic_(deterministic) {}

  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    const std::string name = NameFor(self);
    if (self.size == 1) return Describe(nullptr, name, at::kCPU);
    if (name_ == kShared && !self.IsOneHost()) {
      throw ConfigurationError(
          absl::StrCat("rank ", self.rank, " of ", self.size,
                       ": backend \"shm\" is for ranks of one host, and this group has several"));
    }
    const StorePtr store = PartOf(site.store, name, self.incarnation);
    std::vector<RankRange> hosts = {{0, self.size}};
    if (name == kHierarchical) {
      auto found = FindHosts(*MakeGroupStore(store), self.rank, self.size,
                             {self.local_begin, self.local_end}, site.connect_timeout);
      if (!found.ok()) return FallBack(site, found.status());
      hosts = *std::move(found);
      if (name_.empty() && static_cast<int>(hosts.size()) == self.size) return gloo_.Connect(site);
      Tell(self, hosts.size());
    }
    auto backend = MakeEngineBackend(store, {.name = name,
                                             .rank = self.rank,
                                             .hosts = std::move(hosts),
                                             .timeout = site.timeout,
                                             .connect_timeout = site.connect_timeout,
                                             .deterministic = deterministic_});
    if (!backend.ok()) return FallBack(site, backend.status());
    return Describe(*std::move(backend), name, at::kCPU);
  }

  void RemoveKeys(const StorePtr& store, const Membership& membership) override {
    const std::string name = NameFor(membership);
    const int size = membership.size;
    RemoveFrom(store, name, membership, {EngineBackendKeys(size, /*one_host=*/true)});
    if (name == kHierarchical) {
      RemoveFrom(store, name, membership,
                 {HostsKeys(size), EngineBackendKeys(size, /*one_host=*/false)});
    }
    if (name_.empty()) gloo_.RemoveKeys(store, membership);
  }

 private:
  std::string NameFor(const Membership& self) const {
    if (!name_.empty()) return name_;
    return self.IsOneHost() ? kShared : kHierarchical;
  }

  void Tell(const Membership& self, size_t hosts) const {
    if (self.rank != 0) return;
    LOG(INFO) << "backend hierarchical: " << self.size << " ranks on " << hosts
              << " hosts; sums are taken in "
              << (deterministic_ ? "one tree over the ranks" : "a tree over the hosts");
  }

  ConnectedBackend FallBack(const BackendSite& site, const absl::Status& reason) {
    const Membership& self = site.membership;
    const std::string about = absl::StrCat(
        "rank ", self.rank, " of ", self.size, ": ",
        NameFor(self) == kShared ? "the ranks share no memory: " : "no hierarchy of hosts: ",
        reason.message());
    if (!name_.empty() || absl::IsDeadlineExceeded(reason)) throw CommunicationError(about);
    // A group whose maker does not know the places of its ranks (Place::local_size 0) is no
    // surprise.
    if (!absl::IsFailedPrecondition(reason)) LOG(WARNING) << about << "; this group uses Gloo";
    return gloo_.Connect(site);
  }

  const std::string name_;
  const bool deterministic_;
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

std::shared_ptr<BackendFactory> MakeOwnFactory(OwnBackendMaker make) {
  return std::make_shared<OwnFactory>(std::move(make));
}

std::shared_ptr<BackendFactory> MakeFactoryOf(const std::string& name, bool deterministic) {
  const bool has_gpu = name.empty() && VisibleCudaDevices() > 0;
  if (name == kNccl || has_gpu) return std::make_shared<NcclFactory>(/*legacy=*/false);
  if (name == "nccl-legacy") return std::make_shared<NcclFactory>(/*legacy=*/true);
  if (name == kGloo) return std::make_shared<GlooFactory>();
  if (name.empty() || name == kShared || name == kHierarchical) {
    return std::make_shared<EngineFactory>(name, deterministic);
  }
  throw ConfigurationError(
      absl::StrCat("backend \"", name,
                   "\" is unknown; there are shm, hierarchical, gloo, nccl and nccl-legacy"));
}

}  // namespace ddp::internal
