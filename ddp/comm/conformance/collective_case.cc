#include "ddp/comm/conformance/collective_case.h"

#include <ATen/CPUGeneratorImpl.h>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace ddp::internal {
namespace {

// The elements that rank `from` sends to rank `to` in an all-to-all with uneven splits.
int64_t UnevenPart(const Case& c, int from, int to) { return c.count * ((from + 2 * to) % 3) / 2; }

int64_t Total(const std::vector<int64_t>& parts) {
  int64_t total = 0;
  for (const int64_t part : parts) total += part;
  return total;
}

// Numbers that depend only on the arguments, and whose reduction over 8 ranks is exact in any order
// unless the case has random floats.
at::Tensor ValuesOf(const Case& c, int rank, size_t index, int64_t length) {
  const uint64_t seed = (c.seed * 64 + rank) * 64 + index;
  const at::Generator generator = at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15);
  const bool complex = c10::isComplexType(c.type);
  const int64_t numbers = complex ? 2 * length : length;
  const at::ScalarType type = complex ? c10::toRealValueType(c.type) : c.type;
  const auto whole = [&](int64_t low, int64_t high) {
    return at::randint(low, high, {numbers}, generator, at::kLong);
  };
  at::Tensor values;
  if (type == at::kBool) {
    values = whole(0, 2);
  } else if (c.random_floats) {
    values = at::randn({numbers}, generator, at::kDouble);
  } else if (Reduces(c.operation) && c.reduction == Reduction::PRODUCT) {
    values = whole(0, 2) + 1;  // no zero: a product with -1 would be -0
  } else if (Reduces(c.operation)) {
    values = type == at::kByte ? whole(0, 9) : whole(-4, 5);
  } else {
    values = whole(-1000, 1000);
  }
  values = values.to(type);
  return complex ? at::view_as_complex(values.view({length, 2})) : values;
}

at::Tensor Combine(const at::Tensor& a, const at::Tensor& b, Reduction reduction) {
  const bool bools = a.scalar_type() == at::kBool;
  switch (reduction) {
    case Reduction::PRODUCT:
      return bools ? a.logical_and(b) : a * b;
    case Reduction::MIN:
      return bools ? a.logical_and(b) : at::minimum(a, b);
    case Reduction::MAX:
      return bools ? a.logical_or(b) : at::maximum(a, b);
    case Reduction::BAND:
      return a.bitwise_and(b);
    case Reduction::BOR:
      return a.bitwise_or(b);
    case Reduction::BXOR:
      return a.bitwise_xor(b);
    default:
      return bools ? a.logical_or(b) : a + b;
  }
}

// Combines in the balanced binary tree: the left part is the largest power of two below the count.
at::Tensor Tree(absl::Span<const at::Tensor> parts, Reduction reduction) {
  if (parts.size() == 1) return parts[0];
  size_t left = 1;
  while (2 * left < parts.size()) left *= 2;
  return Combine(Tree(parts.first(left), reduction), Tree(parts.subspan(left), reduction),
                 reduction);
}

at::Tensor Reduced(std::vector<at::Tensor> parts, Reduction reduction) {
  if (reduction == Reduction::PREMUL_SUM) {
    for (at::Tensor& part : parts) part = part * kPremulFactor;
  }
  const at::Tensor result = Tree(parts, reduction);
  if (reduction != Reduction::AVG) return result;
  const auto size = static_cast<int64_t>(parts.size());
  // ATen divides complex numbers by way of a rounded reciprocal.
  if (!result.is_complex()) return result.div(size).to(result.scalar_type());
  return at::view_as_complex(at::view_as_real(result).div(size));
}

std::vector<at::Tensor> Column(const AllInputs& inputs, size_t index) {
  std::vector<at::Tensor> column;
  for (const auto& of_rank : inputs) column.push_back(of_rank.at(index));
  return column;
}

// Returns the parts that `rank` receives in an all-to-all of one tensor.
at::Tensor Exchanged(const Case& c, const AllInputs& inputs, int rank) {
  const int size = static_cast<int>(inputs.size());
  std::vector<at::Tensor> received;
  for (int from = 0; from < size; ++from) {
    std::vector<int64_t> parts(size, c.count);
    if (c.operation == Operation::kAllToAllBaseUneven) parts = UnevenSends(c, from, size);
    received.push_back(inputs[from][0].split_with_sizes(parts)[rank]);
  }
  return at::cat(received);
}

}  // namespace

bool Reduces(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
    case Operation::kAllReduceCoalesced:
    case Operation::kReduce:
    case Operation::kReduceScatter:
    case Operation::kReduceScatterBase:
    case Operation::kReduceScatterBaseCoalesced:
      return true;
    default:
      return false;
  }
}

bool HasRoot(Operation operation) {
  return operation == Operation::kBroadcast || operation == Operation::kReduce ||
         operation == Operation::kGather || operation == Operation::kScatter;
}

bool InPlace(Operation operation) {
  return operation == Operation::kBroadcast || operation == Operation::kAllReduce ||
         operation == Operation::kAllReduceCoalesced || operation == Operation::kReduce;
}

const char* NameOf(Reduction reduction) {
  static constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                           "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return kNames[reduction];
}

std::string Describe(const Case& c, int size) {
  return absl::StrCat(NameOf(c.operation), " on ", size, " ranks, ", c10::toString(c.type),
                      Reduces(c.operation) ? absl::StrCat(", ", NameOf(c.reduction)) : "",
                      HasRoot(c.operation) ? absl::StrCat(", root ", c.root) : "", ", ", c.count,
                      " elements", c.strided ? ", strided" : "",
                      c.random_floats ? ", random numbers" : "", ", data seed ", c.seed);
}

bool Claimed(const Claims& claims, const Case& c) {
  if (!claims.Has(c.operation)) return false;
  if (c.strided && !claims.TakesStrided(c.operation)) return false;
  return Reduces(c.operation) ? claims.reduces(c.reduction, c.type)
                              : claims.moves(c.operation, c.type);
}

at::Tensor Packed(const at::Tensor& tensor) {
  return at::empty({tensor.numel()}, tensor.scalar_type()).copy_(tensor.flatten());
}

bool SameBytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() != b.numel() || a.scalar_type() != b.scalar_type()) return false;
  return at::equal(Packed(a).view(at::kByte), Packed(b).view(at::kByte));
}

std::vector<int64_t> UnevenSends(const Case& c, int rank, int size) {
  std::vector<int64_t> parts;
  for (int to = 0; to < size; ++to) parts.push_back(UnevenPart(c, rank, to));
  return parts;
}

std::vector<int64_t> UnevenReceives(const Case& c, int rank, int size) {
  std::vector<int64_t> parts;
  for (int from = 0; from < size; ++from) parts.push_back(UnevenPart(c, from, rank));
  return parts;
}

std::vector<int64_t> InputLengths(const Case& c, int rank, int size) {
  switch (c.operation) {
    case Operation::kAllReduceCoalesced:
      return {c.count, 1, 3};
    case Operation::kAllGatherBaseCoalesced:
      return {c.count, 3};
    case Operation::kReduceScatter:
    case Operation::kAllToAll:
      return std::vector<int64_t>(size, c.count);
    case Operation::kReduceScatterBase:
    case Operation::kAllToAllBase:
      return {size * c.count};
    case Operation::kReduceScatterBaseCoalesced:
      return {size * c.count, size * 3};
    case Operation::kAllToAllBaseUneven:
      return {Total(UnevenSends(c, rank, size))};
    case Operation::kScatter:
      return std::vector<int64_t>(rank == c.root ? size : 0, c.count);
    default:
      return {c.count};
  }
}

std::vector<int64_t> OutputLengths(const Case& c, int rank, int size) {
  switch (c.operation) {
    case Operation::kAllGather:
    case Operation::kAllToAll:
      return std::vector<int64_t>(size, c.count);
    case Operation::kAllGatherBase:
    case Operation::kAllToAllBase:
      return {size * c.count};
    case Operation::kAllGatherBaseCoalesced:
      return {size * c.count, size * 3};
    case Operation::kReduceScatterBaseCoalesced:
      return {c.count, 3};
    case Operation::kAllToAllBaseUneven:
      return {Total(UnevenReceives(c, rank, size))};
    case Operation::kGather:
      return std::vector<int64_t>(rank == c.root ? size : 0, c.count);
    default:
      return {c.count};
  }
}

std::vector<at::Tensor> InputsOf(const Case& c, int rank, int size) {
  std::vector<at::Tensor> inputs;
  for (const int64_t length : InputLengths(c, rank, size)) {
    inputs.push_back(ValuesOf(c, rank, inputs.size(), length));
  }
  return inputs;
}

AllInputs AllInputsOf(const Case& c, int size) {
  AllInputs inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(InputsOf(c, rank, size));
  return inputs;
}

std::vector<at::Tensor> ExpectedOf(const Case& c, const AllInputs& inputs, int rank) {
  const int size = static_cast<int>(inputs.size());
  std::vector<at::Tensor> expected;
  switch (c.operation) {
    case Operation::kBroadcast:
      return inputs[c.root];
    case Operation::kReduce:
      if (rank != c.root) return {};
      [[fallthrough]];
    case Operation::kAllReduce:
    case Operation::kAllReduceCoalesced:
      for (size_t i = 0; i < inputs[0].size(); ++i) {
        expected.push_back(Reduced(Column(inputs, i), c.reduction));
      }
      return expected;
    case Operation::kReduceScatter:
      return {Reduced(Column(inputs, rank), c.reduction)};
    case Operation::kReduceScatterBase:
    case Operation::kReduceScatterBaseCoalesced:
      for (size_t i = 0; i < inputs[0].size(); ++i) {
        const at::Tensor all = Reduced(Column(inputs, i), c.reduction);
        expected.push_back(all.narrow(0, rank * (all.numel() / size), all.numel() / size));
      }
      return expected;
    case Operation::kAllGatherBase:
    case Operation::kAllGatherBaseCoalesced:
      for (size_t i = 0; i < inputs[0].size(); ++i) expected.push_back(at::cat(Column(inputs, i)));
      return expected;
    case Operation::kGather:
      if (rank != c.root) return {};
      [[fallthrough]];
    case Operation::kAllGather:
      return Column(inputs, 0);
    case Operation::kAllToAll:
      return Column(inputs, rank);
    case Operation::kAllToAllBase:
    case Operation::kAllToAllBaseUneven:
      return {Exchanged(c, inputs, rank)};
    case Operation::kScatter:
      return {inputs[c.root][rank]};
    case Operation::kSendReceive:
      return inputs[(rank + size - 1) % size];
    default:
      return {};
  }
}

}  // namespace ddp::internal
