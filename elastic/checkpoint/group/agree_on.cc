#include "elastic/checkpoint/group/agree_on.h"

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/group/wire_status.h"

namespace ddp::elastic {
namespace {

std::string FirstError(const std::vector<std::string>& values) {
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const absl::Status status = DecodeResult(values[rank]).status();
    if (!status.ok()) return EncodeResult(FromRank(rank, status));
  }
  return EncodeResult(std::string());
}

}  // namespace

absl::Status AgreeOn(CheckpointGroup& group, const absl::Status& mine) {
  const std::string value = mine.ok() ? EncodeResult(std::string()) : EncodeResult(mine);
  DDP_ASSIGN_OR_RETURN(const std::string answer, group.Decide(value, FirstError));
  return DecodeResult(answer).status();
}

}  // namespace ddp::elastic
