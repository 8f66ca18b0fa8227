#include "ddp/wrapper/model_agreement.h"

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/model/model_metadata.h"
#include "ddp/process_group.h"
#include "ddp/transfer/hash_agreement.h"

namespace ddp::internal {
namespace {

// Every rank reads the same texts, and so finds the same first difference.
void ThrowFirstDifference(ProcessGroup& group, const ModelMetadata& metadata, const char* about,
                          int sequence) {
  const auto key = [&](int rank) {
    return absl::StrCat("ddp/model/", group.incarnation(), "/", sequence, "/", rank);
  };
  group.store()->set(key(group.rank()), metadata.Serialize());
  const std::string first = group.store()->get_to_str(key(0));
  for (int rank = 1; rank < group.size(); ++rank) {
    const std::string other = group.store()->get_to_str(key(rank));
    const std::string difference = ModelMetadata::FirstDifference(first, 0, other, rank);
    if (difference.empty()) continue;
    group.barrier();  // no rank leaves, and perhaps ends the store, before all have read
    throw ConfigurationError(absl::StrCat("the ranks have different ", about, ": ", difference));
  }
}

}  // namespace

void AgreeOnModel(ProcessGroup& group, const ModelMetadata& metadata, const char* about,
                  const std::string& change) {
  const int sequence = group.next_sequence();  // counted also when the comparison fails
  const std::string cause =
      change.empty() ? "" : absl::StrCat(" after a change of parameter ", change);
  const OperationName what = absl::StrCat("the comparison of ", about, cause);
  if (SameOnAllRanks(metadata.Hash(), group.device(), what, group.communicator())) return;
  ThrowFirstDifference(group, metadata, about, sequence);
}

}  // namespace ddp::internal
