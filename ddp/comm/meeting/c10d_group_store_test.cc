// The rules of a GroupStore, on a c10d::Store and on the fake that other tests use.
#include "ddp/comm/meeting/c10d_group_store.h"

#include <memory>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/time/time.h"
#include "ddp/comm/meeting/group_store.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;

class GroupStoreTest : public ::testing::TestWithParam<bool> {
 protected:
  const std::shared_ptr<GroupStore> store_ =
      GetParam() ? MakeGroupStore(c10::make_intrusive<c10d::HashStore>())
                 : std::make_shared<::ddp::testing::FakeGroupStore>();
};

TEST_P(GroupStoreTest, HoldsValues) {
  EXPECT_FALSE(store_->Has({"a"}));
  store_->Set("a", "1");
  store_->SetAll({"b", "c"}, "2");
  EXPECT_TRUE(store_->Has({"a", "b", "c"}));
  EXPECT_FALSE(store_->Has({"a", "d"}));
  EXPECT_EQ(store_->Get("a"), "1");
  EXPECT_THAT(store_->GetAll({"c", "a"}), ElementsAre("2", "1"));
  EXPECT_TRUE(store_->GetAll({}).empty());
  store_->Delete("a");
  EXPECT_FALSE(store_->Has({"a"}));
}

TEST_P(GroupStoreTest, TheFirstAuthorWins) {
  EXPECT_EQ(store_->SetIfNew("entry", "mine"), "mine");
  EXPECT_EQ(store_->SetIfNew("entry", "yours"), "mine");
  EXPECT_EQ(store_->Get("entry"), "mine");
}

TEST_P(GroupStoreTest, Counts) {
  EXPECT_EQ(store_->Add("count", 0), 0);
  EXPECT_EQ(store_->Add("count", 2), 2);
  EXPECT_EQ(store_->Add("count", -1), 1);
}

TEST_P(GroupStoreTest, AWaitEndsWithTheKeyOrTheTime) {
  EXPECT_FALSE(store_->Wait("late", absl::Milliseconds(1)));
  const std::shared_ptr<GroupStore> other = store_->Clone();
  std::thread author([&] { other->Set("late", "1"); });
  EXPECT_TRUE(store_->Wait("late", absl::Seconds(60)));
  author.join();
}

INSTANTIATE_TEST_SUITE_P(Stores, GroupStoreTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "C10d" : "Fake"; });

}  // namespace
}  // namespace ddp::internal
