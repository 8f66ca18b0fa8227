#include "ddp/comm/backend_factory/backend_factory.h"

#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/common/error.h"
#include "ddp/common/membership.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::HasSubstr;

class OtherBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "other"; }
};

class BackendFactoryTest : public ::testing::Test {
 protected:
  BackendSite Site(const Membership& membership) const {
    return {.store = store_,
            .membership = membership,
            .timeout = absl::Seconds(60),
            .connect_timeout = absl::Seconds(60)};
  }
  static std::string ErrorOf(const std::function<void()>& action) {
    try {
      action();
    } catch (const ConfigurationError& error) {
      return error.what();
    }
    return "no error";
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(BackendFactoryTest, AGroupOfOneNeedsNoGloo) {
  const ConnectedBackend alone = MakeFactoryOf("gloo")->Connect(Site({}));
  EXPECT_FALSE(alone.backend);
  EXPECT_EQ(alone.traits.name, "gloo");
  EXPECT_EQ(alone.traits.tensor_device, at::Device(at::kCPU));
  EXPECT_FALSE(alone.traits.RunsOnStream(alone.device));
  EXPECT_TRUE(alone.traits.has_message_tags);
}

TEST_F(BackendFactoryTest, AnUnknownNameIsRefused) {
  EXPECT_THAT(
      ErrorOf([] { MakeFactoryOf("mpi"); }),
      HasSubstr(
          "backend \"mpi\" is unknown; there are shm, hierarchical, gloo, nccl and nccl-legacy"));
}

TEST_F(BackendFactoryTest, AProgramsBackendNamesItself) {
  Membership asked;
  const auto factory = MakeOwnFactory([&](const BackendSite& site) {
    asked = site.membership;
    site.store->set("key", std::string("of this backend"));
    return c10::make_intrusive<OtherBackend>(site.membership.rank, site.membership.size);
  });
  const Membership self{.rank = 1, .size = 4, .incarnation = 3};
  const ConnectedBackend own = factory->Connect(Site(self));
  EXPECT_EQ(asked, self);
  EXPECT_TRUE(store_->check({"ddp/own/3/key"}));
  EXPECT_EQ(own.traits.name, "other");
  EXPECT_EQ(own.traits.tensor_device, std::nullopt) << "the backend decides";
  EXPECT_EQ(own.traits.set_tag, nullptr);
  EXPECT_EQ(own.device, at::Device(at::kCPU));
}

TEST_F(BackendFactoryTest, AProgramsBackendHasTheRankAndSizeOfTheGroup) {
  const Membership self{.rank = 1, .size = 4};
  EXPECT_THAT(ErrorOf([&] {
                MakeOwnFactory([](const BackendSite&) {
                  return c10::make_intrusive<OtherBackend>(0, 4);
                })->Connect(Site(self));
              }),
              HasSubstr("rank 1 of 4: make_backend returned a backend of rank 0 of 4"));
  EXPECT_THAT(ErrorOf([&] {
                MakeOwnFactory([](const BackendSite&) {
                  return c10::intrusive_ptr<c10d::Backend>();
                })->Connect(Site(self));
              }),
              HasSubstr("make_backend returned no backend"));
}

TEST_F(BackendFactoryTest, GloosAddressesAreRemoved) {
  for (const char* key : {"ddp/gloo/0/0/0", "ddp/gloo/0/0/1", "ddp/gloo/1/0/0", "ddp/gloo/1/0/1"}) {
    store_->set(key, std::string("an address"));
  }
  MakeFactoryOf("gloo")->RemoveKeys(store_, {.rank = 0, .size = 2, .incarnation = 1});
  EXPECT_EQ(store_->getNumKeys(), 0);
}

}  // namespace
}  // namespace ddp::internal
