#include "ddp/device_mesh.h"

#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "ddp/common/error.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/groups.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::GroupOfOne;
using ::ddp::testing::RankStore;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

RANK_TEST(DeviceMeshTest, TwoDimensions, .world_size = 4,
          .stores = {RankStore::kRedis, RankStore::kTcpStore}) {
  const auto group = init_process_group();
  const int rank = group->rank();
  const std::string type = c10::DeviceTypeName(group->device().type(), /*lower_case=*/true);
  const auto numbers = at::TensorOptions(group->device()).dtype(at::kLong);
  const DeviceMesh mesh = init_device_mesh(group, type, {2, 2}, {"replicate", "shard"});
  EXPECT_EQ(mesh.ndim(), 2);
  EXPECT_EQ(mesh.size(), 4);
  EXPECT_THAT(mesh.shape(), ElementsAre(2, 2));
  EXPECT_THAT(mesh.coordinate(), ElementsAre(rank / 2, rank % 2));
  const at::Tensor down = at::full({1}, rank, numbers);
  mesh.get_group(0)->all_reduce(down);
  EXPECT_EQ(down.item<int64_t>(), rank % 2 == 0 ? 2 : 4);
  const DeviceMesh line = mesh["shard"];
  EXPECT_EQ(line.ndim(), 1);
  EXPECT_EQ(line.get_group(), mesh.get_group("shard"));
  EXPECT_THAT(line.coordinate(), ElementsAre(rank % 2));
  const at::Tensor across = at::full({1}, rank, numbers);
  line.get_group()->all_reduce(across);
  EXPECT_EQ(across.item<int64_t>(), rank < 2 ? 1 : 5);
  EXPECT_EQ(init_device_mesh(group, type, {4}).get_group(), group);

  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { mesh["pipeline"]; }),
              HasSubstr("no dimension \"pipeline\"; it has [replicate, shard]"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { mesh.get_group(2); }),
              HasSubstr("of 2 dimensions has no dimension 2"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { mesh.get_group(-1); }),
              HasSubstr("has no dimension -1"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                init_device_mesh(group, type, {2, 3});
              }),
              HasSubstr("shape [2, 3] does not fit a group of 4 ranks"));
  group->barrier();
}

TEST(DeviceMeshTest, RefusesWhatDoesNotFitTheGroup) {
  const auto group = GroupOfOne();
  const auto refused = [](const std::shared_ptr<ProcessGroup>& group, const std::string& type,
                          const std::vector<int64_t>& shape,
                          const std::vector<std::string>& names = {}) {
    return ErrorOf<ConfigurationError>([&] { init_device_mesh(group, type, shape, names); });
  };
  EXPECT_EQ(refused(nullptr, "cpu", {1}), "a device mesh needs a process group");
  EXPECT_THAT(refused(group, "cuda", {1}),
              HasSubstr("\"cuda\" does not fit a process group that works on cpu (gloo)"));
  const std::string shape = "does not fit a group of 1 ranks: its extents must multiply to that";
  EXPECT_THAT(refused(group, "cpu", {}), HasSubstr("shape [] " + shape));
  EXPECT_THAT(refused(group, "cpu", {2}), HasSubstr("shape [2] " + shape));
  EXPECT_THAT(refused(group, "cpu", {0, 1}), HasSubstr("shape [0, 1] " + shape));
  EXPECT_THAT(refused(group, "cpu", {-1, -1}), HasSubstr("shape [-1, -1] " + shape));
  // The product of the extents overflows.
  const int64_t half = int64_t{1} << 32;
  EXPECT_THAT(refused(group, "cpu", {half, half}), HasSubstr(shape));
  const std::string names = "of 2 dimensions needs as many different names, not ";
  EXPECT_THAT(refused(group, "cpu", {1, 1}, {"a", "a"}), HasSubstr(names + "[a, a]"));
  EXPECT_THAT(refused(group, "cpu", {1, 1}, {"a"}), HasSubstr(names + "[a]"));
}

TEST(DeviceMeshTest, OneDimensionIsTheGroupItself) {
  const auto group = GroupOfOne();
  const DeviceMesh mesh = init_device_mesh(group, "cpu", {1}, {"replicate"});
  EXPECT_EQ(mesh.get_group(), group);
  EXPECT_EQ(mesh["replicate"].get_group("replicate"), group);
  EXPECT_EQ(mesh.device_type(), "cpu");
}

}  // namespace
}  // namespace ddp
