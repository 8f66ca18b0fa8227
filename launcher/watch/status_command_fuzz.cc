// Fuzz target for the arguments of `ddprun status`: accepted arguments can be written down and
// parsed again, and an error is one line.
#include "launcher/watch/status_command.h"

#include <glog/logging.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "launcher/flags/rendezvous_choice.h"
#include "testing/fuzz_target.h"

namespace ddp::launcher {
namespace {

using Words = std::vector<std::string>;

std::optional<std::string> NoVariable(const std::string&) { return std::nullopt; }

// Returns arguments for the same request. No argument can undo what the variables set.
Words Written(const StatusRequest& request) {
  Words words;
  if (request.help) words.emplace_back("-h");
  if (request.json) words.emplace_back("--json");
  if (request.all) words.emplace_back("--all");
  if (request.endpoint.has_value()) words.push_back("--rdzv_endpoint=" + *request.endpoint);
  if (request.default_port == kC10dPort) words.emplace_back("--rdzv-backend=c10d");
  if (request.run_id.has_value()) words.push_back("--rdzv-id=" + *request.run_id);
  if (request.instance > 0) words.push_back(absl::StrCat("--instance=", request.instance));
  return words;
}

void CheckWords(const Words& arguments, const std::string& variable) {
  const auto request = ParseStatusArguments(
      arguments, [&variable](const std::string& name) -> std::optional<std::string> {
        return name == "PET_RDZV_ENDPOINT" ? std::make_optional(variable) : std::nullopt;
      });
  if (!request.ok()) {
    CHECK(absl::IsInvalidArgument(request.status())) << request.status();
    CHECK(testing::IsOneLine(request.status().message())) << request.status();
    return;
  }
  CHECK_GE(request->instance, 0);
  CHECK(request->endpoint != "" && request->run_id != "");
  const Words words = Written(*request);
  const auto again = ParseStatusArguments(words, &NoVariable);
  CHECK(again.ok()) << again.status();
  CHECK(Written(*again) == words) << absl::StrJoin(words, " ");
}

}  // namespace
}  // namespace ddp::launcher

namespace ddp::testing {

// The input is words that end with zeros. The first one is a variable's value.
void FuzzOne(absl::string_view input) {
  launcher::Words words = absl::StrSplit(input, '\0');
  const std::string variable = words.front();
  words.erase(words.begin());
  launcher::CheckWords(words, variable);
}

std::vector<std::string> FuzzSeeds() {
  const auto seed = [](const launcher::Words& words) {
    return absl::StrJoin(words, std::string(1, '\0'));
  };
  return {seed({"", "--rdzv-endpoint", "redis://h:1/2", "--rdzv_id=job", "--json"}),
          seed({"h:1", "--instance=3", "--all", "-h"}),
          seed({"h", "--instance", "x"}),
          seed({"h", "--rdzv-backend=c10d"}),
          seed({"h", "--rdzv_backend", "static", "--rdzv-endpoint=h"}),
          seed({"", "--help", "word"}),
          seed({"", "--json=1"}),
          seed({"", "--rdzv-id"})};
}

}  // namespace ddp::testing
