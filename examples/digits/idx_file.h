#ifndef DDP_EXAMPLES_DIGITS_IDX_FILE_H_
#define DDP_EXAMPLES_DIGITS_IDX_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::examples {

// A file in the IDX format of MNIST with unsigned bytes: two zero bytes, the type 0x08, the number
// of dimensions, each dimension as a big-endian 32-bit number, then the values, row by row.
struct IdxFile {
  std::vector<int64_t> shape;
  std::vector<uint8_t> values;  // as many as the product of the shape

  // kNotFound: no such file. kInvalidArgument, naming the file and what is wrong: not an IDX file
  // of bytes with `dimensions` dimensions, an empty or absurd dimension, a length other than the
  // header says.
  static absl::StatusOr<IdxFile> Read(const std::string& path, int dimensions);

  // The same over bytes that were read already; `name` is for messages.
  static absl::StatusOr<IdxFile> Parse(const std::string& name, const std::string& bytes,
                                       int dimensions);
};

}  // namespace ddp::examples

#endif  // DDP_EXAMPLES_DIGITS_IDX_FILE_H_
