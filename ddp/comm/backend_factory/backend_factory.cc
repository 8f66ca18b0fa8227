#include "ddp/comm/backend_factory/backend_factory.h"

#include <optional>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_cat.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/backend/nccl_backend.h"
#include "ddp/comm/backend/reduction_support.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

constexpr char kGloo[] = "gloo";
constexpr char kNccl[] = "nccl";

using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr PartOf(const StorePtr& store, const std::string& name, int64_t incarnation) {
  return c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("ddp/", name, "/", incarnation),
                                                store);
}

at::Device GpuOf(const Membership& membership) {
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(membership.local_rank));
}

// Describes a backend by its name and its type, whoever has made it.
ConnectedBackend Describe(c10::intrusive_ptr<c10d::Backend> backend, const std::string& name,
                          at::Device device) {
  BackendTraits traits{.name = name, .has_message_tags = name != kNccl};
  if (name == kGloo || name == kNccl) traits.tensor_device = device;
  if (name == kGloo) traits.refusal = &GlooRefusal;
  if (name == kNccl) traits.refusal = &NcclRefusal;
  if (backend && IsGloo(*backend)) AddGlooTraits(traits);
  return {.backend = std::move(backend), .device = device, .traits = std::move(traits)};
}

class GlooFactory : public BackendFactory {
 public:
  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    if (self.size == 1) return Describe(nullptr, kGloo, at::kCPU);
    auto gloo = MakeGlooBackend(PartOf(site.store, kGloo, self.incarnation),
                                {.rank = self.rank,
                                 .size = self.size,
                                 .timeout = site.connect_timeout,
                                 .single_host = self.IsOneHost()});
    gloo->setTimeout(absl::ToChronoMilliseconds(site.timeout));
    return Describe(std::move(gloo), kGloo, at::kCPU);
  }

  void RemoveKeys(const StorePtr& store, const Membership& membership) override {
    if (membership.size == 1) return;
    for (int64_t incarnation = 0; incarnation <= membership.incarnation; ++incarnation) {
      const StorePtr addresses = PartOf(store, kGloo, incarnation);
      for (int rank = 0; rank < membership.size; ++rank) {
        addresses->deleteKey(absl::StrCat("0/", rank));  // the name that LibTorch's Gloo gives it
      }
    }
  }
};

class NcclFactory : public BackendFactory {
 public:
  ConnectedBackend Connect(const BackendSite& site) override {
    const Membership& self = site.membership;
    auto nccl = MakeNcclBackend(
        PartOf(site.store, kNccl, self.incarnation),
        {.rank = self.rank, .size = self.size, .device = self.local_rank, .timeout = site.timeout});
    return Describe(std::move(nccl), kNccl, GpuOf(self));
  }
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

std::shared_ptr<BackendFactory> MakeNcclFactory() { return std::make_shared<NcclFactory>(); }

std::shared_ptr<BackendFactory> MakeOwnFactory(OwnBackendMaker make) {
  return std::make_shared<OwnFactory>(std::move(make));
}

std::shared_ptr<BackendFactory> MakeFactoryOf(const std::string& name) {
  if (name.empty()) return NcclAvailable() ? MakeNcclFactory() : MakeGlooFactory();
  if (name == kGloo) return MakeGlooFactory();
  if (name == kNccl) return MakeNcclFactory();
  throw ConfigurationError(
      absl::StrCat("backend \"", name, "\" is unknown; there are gloo and nccl"));
}

}  // namespace ddp::internal
