#include "ddp/comm/conformance/case_run.h"

#include <algorithm>
#include <exception>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ddp::internal {
namespace {

std::vector<at::Tensor> TensorsOf(const std::vector<GuardedTensor>& guarded) {
  std::vector<at::Tensor> tensors;
  for (const GuardedTensor& each : guarded) tensors.push_back(each.tensor());
  return tensors;
}

// The supplement by its name of LibTorch 2.11, which every later version keeps: c10d's function
// that makes such an operation changed its name.
c10d::ReduceOp ReductionOf(const Case& c) {
  if (c.reduction != Reduction::PREMUL_SUM) return c10d::ReduceOp(c.reduction);
  using Supplement = c10d::NCCLPreMulSumSupplement;
  c10d::ReduceOp op;
  op.op_ = c10d::ReduceOp::PREMUL_SUM;
  op.supplement_ = c.seed % 2 == 0
                       ? c10::make_intrusive<Supplement>(kPremulFactor)
                       : c10::make_intrusive<Supplement>(at::full({1}, kPremulFactor, c.type));
  return op;
}

// The options of a collective, with those of `c` that this kind has.
template <typename Options>
Options OptionsOf(const Case& c) {
  Options options;
  if constexpr (requires { options.reduceOp; }) options.reduceOp = ReductionOf(c);
  if constexpr (requires { options.rootRank; }) options.rootRank = c.root;
  return options;
}

c10::intrusive_ptr<c10d::Work> LaunchReduction(c10d::Backend& backend, const Case& c,
                                               std::vector<at::Tensor> in,
                                               std::vector<at::Tensor> out) {
  std::vector<std::vector<at::Tensor>> lists = {in};
  switch (c.operation) {
    case Operation::kAllReduce:
      return backend.allreduce(out, OptionsOf<c10d::AllreduceOptions>(c));
    case Operation::kAllReduceCoalesced:
      return backend.allreduce_coalesced(out, OptionsOf<c10d::AllreduceCoalescedOptions>(c));
    case Operation::kReduce:
      return backend.reduce(out, OptionsOf<c10d::ReduceOptions>(c));
    case Operation::kReduceScatter:
      return backend.reduce_scatter(out, lists, OptionsOf<c10d::ReduceScatterOptions>(c));
    case Operation::kReduceScatterBase:
      return backend._reduce_scatter_base(out[0], in[0], OptionsOf<c10d::ReduceScatterOptions>(c));
    default:
      return backend.reduce_scatter_tensor_coalesced(out, in,
                                                     OptionsOf<c10d::ReduceScatterOptions>(c));
  }
}

c10::intrusive_ptr<c10d::Work> LaunchMove(c10d::Backend& backend, const Case& c,
                                          std::vector<at::Tensor> in, std::vector<at::Tensor> out) {
  const int rank = backend.getRank();
  const int size = backend.getSize();
  std::vector<std::vector<at::Tensor>> lists;  // of the root alone, or of every rank
  std::vector<int64_t> sends, receives;
  switch (c.operation) {
    case Operation::kBroadcast:
      return backend.broadcast(out, OptionsOf<c10d::BroadcastOptions>(c));
    case Operation::kAllGather:
      lists = {out};
      return backend.allgather(lists, in);
    case Operation::kAllGatherBase:
      return backend._allgather_base(out[0], in[0]);
    case Operation::kAllGatherBaseCoalesced:
      return backend.allgather_into_tensor_coalesced(out, in);
    case Operation::kAllToAll:
      return backend.alltoall(out, in);
    case Operation::kAllToAllBaseUneven:
      sends = UnevenSends(c, rank, size);
      receives = UnevenReceives(c, rank, size);
      [[fallthrough]];
    case Operation::kAllToAllBase:
      return backend.alltoall_base(out[0], in[0], receives, sends);
    case Operation::kGather:
      if (rank == c.root) lists = {out};
      return backend.gather(lists, in, OptionsOf<c10d::GatherOptions>(c));
    case Operation::kScatter:
      if (rank == c.root) lists = {in};
      return backend.scatter(out, lists, OptionsOf<c10d::ScatterOptions>(c));
    case Operation::kReceiveAny:
      return backend.recvAnysource(out, /*tag=*/0);
    default:
      return backend.barrier();
  }
}

// Returns the number with all of its digits.
std::string Exactly(const at::Tensor& number) {
  const c10::complex<double> value = number.item().toComplexDouble();
  if (!number.is_complex()) return absl::StrFormat("%.17g", value.real());
  return absl::StrFormat("%.17g%+.17gi", value.real(), value.imag());
}

}  // namespace

GuardedTensor::GuardedTensor(const at::Tensor& values, int64_t before, bool strided) {
  const int64_t step = strided ? 2 : 1;
  const int64_t end = before + step * values.numel();
  bytes_ = at::full({(end + kAfter) * values.element_size()}, kGuard, at::kByte);
  tensor_ = bytes_.view(values.scalar_type()).slice(0, before, end, step);
  tensor_.copy_(values);
}

bool GuardedTensor::Intact() const {
  // A copy to a bool would change the bytes of the guard.
  const at::ScalarType type =
      tensor_.scalar_type() == at::kBool ? at::kByte : tensor_.scalar_type();
  const at::Tensor others = bytes_.clone();
  const at::Tensor guard = at::full({tensor_.numel() * tensor_.element_size()}, kGuard, at::kByte);
  others.view(type)
      .as_strided(tensor_.sizes(), tensor_.strides(), tensor_.storage_offset())
      .copy_(guard.view(type));
  return others.eq(kGuard).all().item<bool>();
}

Running Launch(const TestRank& self, const Case& c) {
  Running running;
  const int64_t before = 1 + (c.seed + self.rank) % 3;
  const bool strided = c.strided && (c.seed + self.rank) % 3 != 0;
  const std::vector<at::Tensor> inputs = InputsOf(c, self.rank, self.size);
  auto& targets = InPlace(c.operation) ? running.outputs : running.inputs;
  for (const at::Tensor& values : inputs) targets.emplace_back(values, before, strided);
  if (!InPlace(c.operation)) {
    for (const int64_t length : OutputLengths(c, self.rank, self.size)) {
      running.outputs.emplace_back(at::zeros({length}, c.type), before, strided);
    }
  }
  std::vector<at::Tensor> in = TensorsOf(running.inputs);
  std::vector<at::Tensor> out = TensorsOf(running.outputs);
  const auto start = [&](auto launch) { running.works.push_back(self.Start(launch)); };
  const int next = (self.rank + 1) % self.size;
  const int previous = (self.rank + self.size - 1) % self.size;
  try {
    if (c.operation == Operation::kSendReceive) {  // around a ring
      start([&](auto& backend) { return backend.send(in, next, c.root); });
      start([&](auto& backend) { return backend.recv(out, previous, c.root); });
    } else if (Reduces(c.operation)) {
      start([&](auto& backend) { return LaunchReduction(backend, c, in, out); });
    } else {
      start([&](auto& backend) { return LaunchMove(backend, c, in, out); });
    }
  } catch (const std::exception& error) {
    running.launch_error = absl::StrCat("at the launch: ", error.what());
  }
  return running;
}

Outcome Finish(const TestRank& self, const Case& c, const Running& running) {
  Outcome outcome;
  outcome.error = running.launch_error;
  if (!outcome.error.empty()) return outcome;
  try {
    for (const auto& work : running.works) Await(work);
  } catch (const std::exception& error) {
    outcome.error = error.what();
    return outcome;
  }
  std::vector<at::Tensor> inputs;
  if (!running.inputs.empty()) inputs = InputsOf(c, self.rank, self.size);
  for (size_t i = 0; i < running.inputs.size(); ++i) {
    if (!SameBytes(running.inputs[i].tensor(), inputs[i])) outcome.error = "an input has changed";
    if (!running.inputs[i].Intact()) outcome.error = "memory around an input has changed";
  }
  for (const GuardedTensor& output : running.outputs) {
    if (!output.Intact()) outcome.error = "memory around an output has changed";
    outcome.outputs.push_back(Packed(output.tensor()));
  }
  return outcome;
}

std::string Difference(const std::vector<at::Tensor>& actual,
                       const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (i >= actual.size()) return absl::StrCat("output ", i, " is missing");
    if (SameBytes(actual[i], expected[i])) continue;
    const at::Tensor differs = actual[i].ne(expected[i]).nonzero().view({-1});
    if (differs.numel() == 0) return absl::StrCat("output ", i, " differs in its bytes only");
    const auto at = differs[0].item<int64_t>();
    return absl::StrCat("output ", i, " differs in ", differs.numel(), " of ", expected[i].numel(),
                        " elements, first in element ", at, ": ", Exactly(actual[i][at]),
                        " instead of ", Exactly(expected[i][at]));
  }
  return "";
}

std::vector<Outcome> RunCases(const TestRank& self, const std::vector<Case>& cases, size_t depth) {
  std::vector<Outcome> outcomes(cases.size());
  const auto alone = [&](size_t i) { return self.claims().Alone(cases[i].operation); };
  size_t end = 0;
  for (size_t begin = 0; begin < cases.size(); begin = end) {
    end = begin + 1;
    while (end < std::min(cases.size(), begin + depth) && !alone(begin) && !alone(end)) ++end;
    std::vector<Running> running;
    for (size_t i = begin; i < end; ++i) running.push_back(Launch(self, cases[i]));
    for (size_t i = end; i-- > begin;) {
      outcomes[i] = Finish(self, cases[i], running[i - begin]);
    }
    self.Settle();
  }
  return outcomes;
}

}  // namespace ddp::internal
