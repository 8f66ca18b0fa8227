#include "elastic/checkpoint/folder/checkpoint_owner.h"

#include <random>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ddp::elastic {
namespace {

std::string RandomNonce() {
  std::random_device device;
  return absl::StrFormat("%08x%08x", device(), device());
}

}  // namespace

std::string OwnerNonce(uint64_t generation, const std::string& generation_nonce) {
  if (generation_nonce.empty()) return RandomNonce();
  if (generation > 0) return generation_nonce;
  return absl::StrCat(generation_nonce.substr(0, 80), "-", RandomNonce());
}

std::string OwnerText(const CheckpointOwner& owner) {
  return absl::StrCat("generation ", owner.generation, " (", owner.nonce, ") of ",
                      owner.instance > 0 ? absl::StrCat("instance ", owner.instance, " of ") : "",
                      "run \"", owner.run_id, "\"");
}

bool MayBeOfOneJob(const CheckpointOwner& a, const CheckpointOwner& b) {
  if (!a.run_id.empty() && !b.run_id.empty() && a.run_id != b.run_id) return false;
  if (!a.job.empty() && !b.job.empty()) return a.job == b.job;
  return a.instance == 0 || b.instance == 0 || a.instance == b.instance;
}

absl::Status MayFollow(const CheckpointOwner& next, const CheckpointOwner& current) {
  if (next.run_id != current.run_id) return absl::OkStatus();
  if (!next.job.empty() && !current.job.empty() && next.job != current.job) {
    return absl::OkStatus();
  }
  // Only ddprun gives a rank an instance.
  const bool compares = next.instance > 0 && current.instance > 0;
  const auto order = [compares](const CheckpointOwner& owner) {
    return std::make_tuple(compares ? owner.instance : 0, owner.generation);
  };
  if (order(next) >= order(current)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      OwnerText(next), " is older than ", OwnerText(current), ", another generation of its job"));
}

}  // namespace ddp::elastic
