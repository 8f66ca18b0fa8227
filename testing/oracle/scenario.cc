#include "testing/oracle/scenario.h"

#include <algorithm>
#include <functional>
#include <map>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ddp::testing {
namespace {

using Json = nlohmann::json;
using Setters = std::map<std::string, std::function<void(const Json&)>>;

absl::Status SetFields(const Json& object, const Setters& setters) {
  for (const auto& [key, value] : object.items()) {
    const auto setter = setters.find(key);
    if (setter == setters.end()) {
      return absl::InvalidArgumentError(absl::StrCat("scenarios: unknown field ", key));
    }
    try {
      setter->second(value);
    } catch (const Json::exception& error) {
      return absl::InvalidArgumentError(absl::StrCat("scenarios: ", key, ": ", error.what()));
    }
  }
  return absl::OkStatus();
}

absl::Status ParseScenario(const Json& object, Scenario& scenario) {
  absl::Status options = absl::OkStatus();
  const auto to = [](auto& field) { return [&field](const Json& value) { value.get_to(field); }; };
  const Setters option_setters = {
      {"broadcast_buffers", to(scenario.broadcast_buffers)},
      {"bucket_cap_mb", [&](const Json& value) { scenario.bucket_cap_mb = value.get<double>(); }},
      {"bucket_cap_mb_list", to(scenario.bucket_cap_mb_list)},
      {"find_unused_parameters", to(scenario.find_unused_parameters)},
      {"gradient_as_bucket_view", to(scenario.gradient_as_bucket_view)},
      {"static_graph", to(scenario.static_graph)},
  };
  const Setters setters = {
      {"name", to(scenario.name)},
      {"model", to(scenario.model)},
      {"options", [&](const Json& value) { options = SetFields(value, option_setters); }},
      {"hook", to(scenario.hook)},
      {"accumulate", to(scenario.accumulate)},
      {"set_to_none", to(scenario.set_to_none)},
      {"finalize", to(scenario.finalize)},
      {"momentum", to(scenario.momentum)},
      {"zero", to(scenario.zero)},
      {"like", to(scenario.like)},
      {"batches", to(scenario.batches)},
      {"divide_by_initial_world_size", to(scenario.divide_by_initial_world_size)},
  };
  const absl::Status status = SetFields(object, setters);
  return status.ok() ? options : status;
}

}  // namespace

int Scenario::StepsOf(int rank) const {
  return batches.empty() ? kOracleSteps : batches[static_cast<size_t>(rank)];
}

int Scenario::RecordedRank(int world_size) const {
  if (batches.empty()) return 0;
  return static_cast<int>(std::max_element(batches.begin(), batches.begin() + world_size) -
                          batches.begin());
}

absl::StatusOr<std::vector<Scenario>> ParseScenarios(const std::string& json) {
  const Json table = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!table.is_array()) return absl::InvalidArgumentError("scenarios: not a JSON list");
  std::vector<Scenario> scenarios;
  for (const Json& object : table) {
    Scenario& scenario = scenarios.emplace_back();
    if (absl::Status status = ParseScenario(object, scenario); !status.ok()) return status;
  }
  return scenarios;
}

}  // namespace ddp::testing
