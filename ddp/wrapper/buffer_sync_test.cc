#include "ddp/wrapper/buffer_sync.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>

#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/fake_model_view.h"
#include "testing/ranks/rank_test.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::FakeModelView;
using ::testing::HasSubstr;

using Location = BufferCommHookLocation;

TensorFuture NewFuture() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
}

TEST(BufferSyncTest, SeesTheBuffersOfTheMoment) {
  const auto model = std::make_shared<FakeModelView>();
  BufferSync sync(model, {"ignored"});
  EXPECT_FALSE(sync.Due(Location::kPreForward, sync.Read()));
  model->named_buffers = {{"ignored", at::zeros({1})}, {"undefined", {}}};
  EXPECT_FALSE(sync.Due(Location::kPreForward, sync.Read()));
  model->named_buffers.push_back({"mean", at::zeros({1})});
  EXPECT_TRUE(sync.Due(Location::kPreForward, sync.Read()));
  EXPECT_FALSE(sync.Due(Location::kPostForward, sync.Read()));
  ASSERT_EQ(sync.Read().size(), 1u);
  const at::Tensor replaced = at::ones({1});
  model->named_buffers.back().tensor = replaced;
  EXPECT_TRUE(sync.Read().at("mean").is_same(replaced));
}

TEST(BufferSyncTest, HasOneHookAtOnePlace) {
  BufferSync sync(std::make_shared<FakeModelView>(), {});
  EXPECT_EQ(sync.HookText(), "none");
  const BufferCommHook hook = [](const auto&) { return std::vector<TensorFuture>(); };
  sync.RegisterHook(hook, Location::kPostForward);
  EXPECT_EQ(sync.HookText(), "after the forward");
  EXPECT_TRUE(sync.Due(Location::kPostForward, sync.Read()));
  EXPECT_FALSE(sync.Due(Location::kPreForward, sync.Read()));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { sync.RegisterHook(hook, Location::kPreForward); }),
              HasSubstr("is registered already"));
}

// A graph may have saved a buffer that the broadcast writes. The batch norm's buffers have changed
// since the last forward without a new version, so the broadcast raises no version of theirs.
RANK_TEST(BufferSyncTest, TheBroadcastRaisesTheVersionOfOtherBuffersOnly, .world_size = 2,
          .not_on_device = "nothing is compared there, for the host would wait") {
  const auto group = init_process_group();
  const auto model = std::make_shared<FakeModelView>();
  const at::Tensor mean = at::zeros({2}), count = at::zeros({1}), table = at::zeros({3});
  model->named_buffers = {{"norm.count", count}, {"norm.mean", mean}, {"table", table}};
  BufferSync sync(model, {});
  sync.Broadcast(*group, 0);

  const auto write = [](const at::Tensor& tensor, double value) {
    tensor.variable_data().fill_(value);  // raises no version
  };
  write(mean, 1 + group->rank());
  if (group->rank() == 0) write(count, 5);
  if (group->rank() == 0) write(table, 7);
  const auto mean_version = mean._version(), count_version = count._version(),
             table_version = table._version();
  sync.Run(*group, Location::kPreForward, 0);
  EXPECT_EQ(mean[0].item<double>(), 1);
  EXPECT_EQ(count[0].item<double>(), 5);
  EXPECT_EQ(table[0].item<double>(), 7);
  EXPECT_EQ(mean._version(), mean_version);
  EXPECT_EQ(count._version(), count_version) << "a buffer of the same submodule";
  EXPECT_EQ(table._version() > table_version, group->rank() == 1) << "written on rank 1 only";

  // A forward without a broadcast is a start as well.
  sync.NoteForward();
  if (group->rank() == 0) write(mean, 9);
  sync.Broadcast(*group, 0);
  EXPECT_EQ(mean[0].item<double>(), 9);
  EXPECT_EQ(mean._version() > mean_version, group->rank() == 1) << "not changed on rank 1";
}

// Counts the collectives of each synchronization: one, or two where a comparison finds a change.
RANK_TEST(BufferSyncTest, UnchangedBuffersAreNotSent, .world_size = 2,
          .not_on_device = "nothing is compared there, for the host would wait") {
  const auto group = init_process_group();
  const auto model = std::make_shared<FakeModelView>();
  const at::Tensor table = at::ones({20'000}), mean = at::zeros({2});
  model->named_buffers = {{"norm.mean", mean}, {"table", table}};
  BufferSync sync(model, {});
  const CollectiveLog& log = *group->communicator().log();
  const auto run = [&] {
    const int64_t before = log.launched();
    sync.Run(*group, Location::kPreForward, 0);
    EXPECT_EQ(mean[0].item<double>(), table[0].item<double>() - 1);
    return log.launched() - before;
  };
  // Changes both buffers on one rank; rank 0's values then hold on all ranks.
  const auto write = [&](int rank, double value) {
    if (group->rank() != rank) return;
    table.variable_data().fill_(1 + value);  // raises no version
    mean.variable_data().fill_(value);
  };
  EXPECT_EQ(run(), 1);  // a broadcast
  EXPECT_EQ(run(), 1);  // a comparison
  const auto version = table._version();
  EXPECT_EQ(run(), 1);
  EXPECT_EQ(table._version(), version);
  for (const int rank : {0, 1}) {
    write(rank, 5 + rank);
    EXPECT_EQ(run(), 2);
    EXPECT_EQ(mean[0].item<double>(), 5);
    EXPECT_EQ(run(), 1);  // a broadcast
    EXPECT_EQ(run(), 1);  // a comparison
  }

  // A forward that is not synchronized records this rank's own values.
  write(1, 8);
  sync.NoteForward();
  EXPECT_EQ(run(), 2);
  EXPECT_EQ(mean[0].item<double>(), 5);

  // Buffers that change each time: comparisons become rare.
  int64_t launched = 0;
  for (int i = 0; i < 40; ++i) {
    write(0, 20 + i);
    launched += run();
    EXPECT_EQ(mean[0].item<double>(), 20 + i);
  }
  EXPECT_LE(launched, 40 + 5);

  sync.Abandon();
  write(1, 90);
  EXPECT_EQ(run(), 1);  // a broadcast
}

// After a failure an operation may still write into the buffers.
RANK_TEST(BufferSyncTest, AbandonedBuffersGetNewMemory, 1) {
  const auto group = init_process_group();
  const auto model = std::make_shared<FakeModelView>();
  const at::Tensor mean = at::ones({2});
  model->named_buffers = {{"mean", mean}};
  BufferSync sync(model, {});
  TensorFuture started = NewFuture();
  sync.RegisterHook(
      [&](const std::map<std::string, at::Tensor>& buffers) {
        EXPECT_TRUE(buffers.at("mean").is_same(mean));
        return std::vector<TensorFuture>{started};
      },
      Location::kPreForward);

  const void* const before = mean.data_ptr();
  started->markCompleted(mean);
  sync.Run(*group, Location::kPreForward, 0);
  sync.Finish(*group);
  sync.Run(*group, Location::kPreForward, 0);
  sync.Abandon();
  EXPECT_EQ(mean.data_ptr(), before) << "nothing is in progress";

  started = NewFuture();
  sync.Run(*group, Location::kPreForward, 0);
  sync.Abandon();
  EXPECT_NE(mean.data_ptr(), before);
  EXPECT_TRUE(at::equal(mean, at::ones({2})));
  sync.Finish(*group);  // does not wait for the abandoned future
}

}  // namespace
}  // namespace ddp::internal
