#include "ddp/model/replica_check.h"

#include <span>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/model/replica_drift.h"
#include "ddp/transfer/hash_agreement.h"

namespace ddp::internal {
namespace {

constexpr char kWhat[] = "the comparison of parameters";

// One parameter at a time is on the host, so that a model of a GPU needs no second copy there.
std::vector<int64_t> HashesOf(const std::vector<NamedTensor>& parameters) {
  std::vector<int64_t> hashes;
  for (const NamedTensor& item : parameters) {
    const at::Tensor bytes = item.tensor.detach().cpu().contiguous();
    hashes.push_back(static_cast<int64_t>(XXH3_64bits(bytes.const_data_ptr(), bytes.nbytes())));
  }
  return hashes;
}

// Returns the hashes of all ranks, rank after rank.
std::vector<int64_t> Gather(const std::vector<int64_t>& hashes, at::Device device,
                            Communicator& communicator) {
  const at::Tensor input = at::tensor(hashes, at::kLong).to(device);
  const at::Tensor output = at::empty({communicator.size() * input.numel()}, input.options());
  Communicator::Pending pending = communicator.Start(
      {.kind = Collective::Kind::kAllGather, .output = output, .input = input}, kWhat, {});
  communicator.Wait(pending);
  const at::Tensor all = communicator.ToHost(output, kWhat);
  const int64_t* const values = all.const_data_ptr<int64_t>();
  return {values, values + all.numel()};
}

}  // namespace

void ReplicaCheck::Compare(const std::vector<NamedTensor>& parameters, int64_t forward,
                           Communicator& communicator) {
  const at::Device device = parameters.front().tensor.device();
  const std::vector<int64_t> hashes = HashesOf(parameters);
  const XXH128_hash_t all = XXH3_128bits(hashes.data(), hashes.size() * sizeof(hashes[0]));
  if (SameOnAllRanks({all.high64, all.low64}, device, kWhat, communicator)) return;
  std::vector<std::string> names;
  for (const NamedTensor& item : parameters) names.push_back(item.name);
  const std::string list = absl::StrJoin(names, "\n");
  const XXH128_hash_t listed = XXH3_128bits(list.data(), list.size());
  if (!SameOnAllRanks({listed.high64, listed.low64}, device, kWhat, communicator)) {
    throw ReductionError(absl::StrCat(
        "the ranks have different lists of parameters before forward ", forward, ": this rank has ",
        names.size(), ". Register the same parameters on all ranks, before the model is wrapped"));
  }
  throw ReductionError(absl::StrCat(
      "the replicas have drifted apart before forward ", forward, ": ",
      DescribeDrift(names, Gather(hashes, device, communicator)),
      ". A replica drifts when its optimizer steps with a local value (the loss in the closure of "
      "LBFGS, a gradient changed after the backward, a random number), or steps on some ranks "
      "only"));
}

}  // namespace ddp::internal
