// One collective as a value: its inputs on every rank, and the result that the definition of the
// collective gives. The reference uses no backend: ATen combines the inputs of all ranks.
#ifndef DDP_COMM_CONFORMANCE_COLLECTIVE_CASE_H_
#define DDP_COMM_CONFORMANCE_COLLECTIVE_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "ddp/comm/conformance/test_backends.h"

namespace ddp::internal {

struct Case {
  Operation operation = Operation::kAllReduce;
  at::ScalarType type = at::kFloat;
  Reduction reduction = Reduction::SUM;
  int64_t count = 7;           // elements of one part of the operation
  int root = 0;                // of a broadcast, reduce, gather, or scatter
  uint64_t seed = 1;           // of the data
  bool strided = false;        // some of the ranks pass tensors with gaps
  bool random_floats = false;  // else small whole numbers, whose order of addition is indifferent
};

bool Reduces(Operation operation);

bool HasRoot(Operation operation);

// Returns true when the output is the input.
bool InPlace(Operation operation);

const char* NameOf(Reduction reduction);

std::string Describe(const Case& c, int size);

// Returns whether `claims` has all that the case needs.
bool Claimed(const Claims& claims, const Case& c);

// Returns a copy with unit stride: also of a single element, which is contiguous with any stride.
at::Tensor Packed(const at::Tensor& tensor);

// Not every type has operators, and -0 equals 0: so it compares the bytes.
bool SameBytes(const at::Tensor& a, const at::Tensor& b);

// ---- The inputs.

std::vector<int64_t> UnevenSends(const Case& c, int rank, int size);

std::vector<int64_t> UnevenReceives(const Case& c, int rank, int size);

// The lengths of the tensors that a rank passes in.
std::vector<int64_t> InputLengths(const Case& c, int rank, int size);

// The lengths of the tensors that a rank gets, unless the operation is in place.
std::vector<int64_t> OutputLengths(const Case& c, int rank, int size);

std::vector<at::Tensor> InputsOf(const Case& c, int rank, int size);

// ---- The reference.

inline constexpr double kPremulFactor = 0.5;

// The inputs of all ranks: inputs[rank][index].
using AllInputs = std::vector<std::vector<at::Tensor>>;

AllInputs AllInputsOf(const Case& c, int size);

// Returns what `rank` must have after the operation. Empty where c10d leaves it open.
std::vector<at::Tensor> ExpectedOf(const Case& c, const AllInputs& inputs, int rank);

}  // namespace ddp::internal

#endif  // DDP_COMM_CONFORMANCE_COLLECTIVE_CASE_H_
