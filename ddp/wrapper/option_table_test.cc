#include "ddp/wrapper/option_table.h"

#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include <ATen/ops/empty.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ddp/model/model_metadata.h"
#include "ddp/options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp::internal {
namespace {

using ::testing::AnyOf;
using ::testing::EndsWith;

using Options = DistributedDataParallelOptions;

std::string Compared(const Options& options) {
  ModelMetadata metadata;
  AddOptions(options, metadata);
  return metadata.Serialize();
}

std::string Difference(const Options& a, const Options& b) {
  return ModelMetadata::FirstDifference(Compared(a), 0, Compared(b), 1);
}

// Sets each option to something other than its default. device_mesh is missing: only a process
// group makes a mesh.
std::map<std::string, std::function<void(Options&)>> Changes() {
  return {
      {"process_group", [](Options& o) { o.process_group = std::shared_ptr<ProcessGroup>(); }},
      {"device_ids", [](Options& o) { o.device_ids = {3}; }},
      {"output_device", [](Options& o) { o.output_device = 3; }},
      {"init_sync", [](Options& o) { o.init_sync = false; }},
      {"check_parameters_every", [](Options& o) { o.check_parameters_every = 10; }},
      {"broadcast_buffers", [](Options& o) { o.broadcast_buffers = false; }},
      {"forward_sync_buffers", [](Options& o) { o.forward_sync_buffers = false; }},
      {"params_and_buffers_to_ignore",
       [](Options& o) { o.params_and_buffers_to_ignore = std::set<std::string>{"fc.bias"}; }},
      {"bucket_cap_mb", [](Options& o) { o.bucket_cap_mb = 3; }},
      {"first_bucket_cap_mb", [](Options& o) { o.first_bucket_cap_mb = 3; }},
      {"bucket_cap_mb_list", [](Options& o) { o.bucket_cap_mb_list = std::vector<double>{3}; }},
      {"bucket_layout",
       [](Options& o) {
         o.bucket_layout = std::vector<std::vector<std::string>>{{"b", "a"}};
       }},
      {"gradient_as_bucket_view", [](Options& o) { o.gradient_as_bucket_view = true; }},
      {"batched_grad_copy", [](Options& o) { o.batched_grad_copy = true; }},
      {"lazy_bucket_allocation", [](Options& o) { o.lazy_bucket_allocation = true; }},
      {"reduce_in_place", [](Options& o) { o.reduce_in_place = false; }},
      {"arena_bytes", [](Options& o) { o.arena_bytes = 1; }},
      {"find_unused_parameters", [](Options& o) { o.find_unused_parameters = true; }},
      {"static_graph", [](Options& o) { o.static_graph = true; }},
      {"skip_all_reduce_unused_params", [](Options& o) { o.skip_all_reduce_unused_params = true; }},
      {"delay_all_reduce_named_params",
       [](Options& o) {
         o.delay_all_reduce_named_params =
             std::vector<std::pair<std::string, at::Tensor>>{{"a", at::Tensor()}};
       }},
      {"param_to_hook_all_reduce", [](Options& o) { o.param_to_hook_all_reduce = at::empty({1}); }},
      {"require_manual_backward_finalization",
       [](Options& o) { o.require_manual_backward_finalization = true; }},
      {"mixed_precision", [](Options& o) { o.mixed_precision = MixedPrecision(); }},
  };
}

// The line of an option in the table of docs/parity.md.
struct Line {
  std::string default_value;
  std::string agreement;  // "nothing": the ranks may differ
  std::string logged;     // a field of DDPLoggingData; empty: none
  std::string effect;
};

// Returns the options and their lines, in the table's order.
std::vector<std::pair<std::string, Line>> TableOfTheDocuments() {
  std::vector<std::pair<std::string, Line>> lines;
  std::ifstream page("docs/parity.md");
  const std::string header = "| Option | Default | Equal on all ranks | Logged as | Effect |";
  bool within = false;
  for (std::string text; std::getline(page, text) && (!within || !text.empty());) {
    within = within || text == header;
    if (!within || text.rfind("| `", 0) != 0) continue;
    std::vector<std::string> cells = absl::StrSplit(text, '|');
    for (std::string& cell : cells) {
      absl::StripAsciiWhitespace(&cell);
    }
    if (cells.size() < 7) continue;
    const auto plain = [](std::string cell) { return absl::StrReplaceAll(cell, {{"`", ""}}); };
    lines.emplace_back(plain(cells[1]), Line{cells[2], cells[3], plain(cells[4]), cells[5]});
  }
  return lines;
}

TEST(OptionTableTest, TheDocumentsHaveALineForEachOption) {
  std::vector<std::string> documented;
  for (const auto& [name, line] : TableOfTheDocuments()) {
    documented.push_back(name);
    EXPECT_THAT(line.default_value, AnyOf("true", "false", "unset", "empty")) << name;
    EXPECT_THAT(line.effect, EndsWith(".")) << name;
  }
  std::vector<std::string> rows;
  for (const OptionRow& row : OptionTable()) rows.emplace_back(row.name);
  EXPECT_EQ(documented, rows) << "the table of options in docs/parity.md lacks or misplaces one";
}

// The ranks compare exactly the options of which the documents say so.
TEST(OptionTableTest, ComparesWhatTheDocumentsPromise) {
  const auto changes = Changes();
  for (const auto& [name, line] : TableOfTheDocuments()) {
    if (name == "device_mesh") continue;
    const auto change = changes.find(name);
    ASSERT_NE(change, changes.end()) << "set " << name << " in Changes()";
    Options changed;
    change->second(changed);
    const bool differs = Compared(changed) != Compared({});
    EXPECT_EQ(differs, line.agreement != "nothing") << name;
  }
}

// The logging data show exactly the options of which the documents say so.
TEST(OptionTableTest, LogsWhatTheDocumentsPromise) {
  const auto logged = [](const Options& options) {
    DDPLoggingData data;
    FillOptions(options, data);
    return nlohmann::json::parse(data.to_json());
  };
  const nlohmann::json defaults = logged({});
  const auto changes = Changes();
  for (const auto& [name, line] : TableOfTheDocuments()) {
    if (name == "device_mesh" || name.find("bucket_cap_mb") != std::string::npos) continue;
    const auto change = changes.find(name);
    ASSERT_NE(change, changes.end()) << "set " << name << " in Changes()";
    Options changed;
    change->second(changed);
    std::string differing;
    const nlohmann::json found = logged(changed);
    for (const auto& [key, value] : found.items()) {
      if (value != defaults.at(key)) differing += key;
    }
    EXPECT_EQ(differing, line.logged) << name;
  }
}

TEST(OptionTableTest, NamesTheFirstDifference) {
  EXPECT_EQ(Difference({}, {.static_graph = true}),
            "option static_graph is 0 on rank 0 and 1 on rank 1");
  EXPECT_EQ(Difference({.bucket_cap_mb = 2}, {}),
            "option bucket_caps is 2097152 2097152 on rank 0 and 1048576 26214400 on rank 1");
  EXPECT_EQ(Difference({.bucket_cap_mb = 2}, {.bucket_cap_mb_list = {{2, 2}}}), "");
  EXPECT_EQ(Difference({.device_ids = {{0}}}, {}),
            "option device_ids.size() is 1 on rank 0 and 0 on rank 1");
  EXPECT_EQ(Difference({.device_ids = {{0}}}, {.device_ids = {{1}}}), "");
  EXPECT_EQ(Difference({.output_device = 1}, {}),
            "option output_device.has_value() is 1 on rank 0 and 0 on rank 1");
  EXPECT_EQ(Difference({.output_device = 1}, {.output_device = 2}), "");
  using Names = std::set<std::string>;
  EXPECT_EQ(Difference({.params_and_buffers_to_ignore = Names{"a", "b"}},
                       {.params_and_buffers_to_ignore = Names{"a"}}),
            "rank 0 has option params_and_buffers_to_ignore (b) where rank 1 has option "
            "require_manual_backward_finalization (0)");
  const std::vector<std::string> pair = {"a", "b"};
  EXPECT_EQ(Difference({.bucket_layout = {{pair}}}, {.bucket_layout = {{{"a"}}}}),
            "option bucket_layout is a b on rank 0 and a on rank 1");
}

// An unset option is equal to the value that it stands for.
TEST(OptionTableTest, UnsetBuffersOfForwardsFollowBroadcastBuffers) {
  EXPECT_EQ(Difference({}, {.forward_sync_buffers = true}), "");
  EXPECT_EQ(Difference({}, {.forward_sync_buffers = false}),
            "option forward_sync_buffers is 1 on rank 0 and 0 on rank 1");
}

TEST(OptionTableTest, ComparesEachFieldOfMixedPrecision) {
  const Options low{.mixed_precision = MixedPrecision{.param_dtype = at::kHalf}};
  EXPECT_EQ(Difference({}, low), "option mixed_precision is not set on rank 0 and set on rank 1");
  const auto with = [](MixedPrecision config) {
    return Options{.mixed_precision = std::move(config)};
  };
  EXPECT_EQ(Difference(low, with({.param_dtype = at::kBFloat16})),
            "option mixed_precision.param_dtype is Half on rank 0 and BFloat16 on rank 1");
  EXPECT_EQ(Difference(low, with({.param_dtype = at::kHalf, .reduce_dtype = at::kFloat})),
            "option mixed_precision.reduce_dtype is as it is on rank 0 and Float on rank 1");
  EXPECT_EQ(Difference(low, with({.param_dtype = at::kHalf, .buffer_dtype = at::kFloat})),
            "option mixed_precision.buffer_dtype is as it is on rank 0 and Float on rank 1");
  EXPECT_EQ(Difference(low, with({.param_dtype = at::kHalf, .cast_forward_inputs = false})),
            "option mixed_precision.cast_forward_inputs is 1 on rank 0 and 0 on rank 1");
}

TEST(OptionTableTest, FillsTheLoggingDataAndItsJson) {
  DDPLoggingData data;
  FillOptions({}, data);
  EXPECT_EQ(data.device_ids, "");
  EXPECT_EQ(data.output_device, -1);
  EXPECT_EQ(data.bucket_cap_bytes, 25 << 20);
  EXPECT_TRUE(data.broadcast_buffers);
  EXPECT_FALSE(data.find_unused_parameters || data.gradient_as_bucket_view || data.static_graph);

  FillOptions({.device_ids = {{2}},
               .output_device = 3,
               .broadcast_buffers = false,
               .bucket_cap_mb_list = {{1, 2}},
               .gradient_as_bucket_view = true,
               .find_unused_parameters = true,
               .static_graph = true},
              data);
  const nlohmann::json json = nlohmann::json::parse(data.to_json());
  EXPECT_EQ(json["device_ids"], "2");
  EXPECT_EQ(json["output_device"], 3);
  EXPECT_EQ(json["bucket_cap_bytes"], 2 << 20);
  EXPECT_EQ(json["broadcast_buffers"], 0);
  EXPECT_EQ(json["find_unused_parameters"], 1);
  EXPECT_EQ(json["gradient_as_bucket_view"], 1);
  EXPECT_EQ(json["static_graph"], 1);
}

}  // namespace
}  // namespace ddp::internal
