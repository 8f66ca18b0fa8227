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

  // Reads the file at `path`. kNotFound: the file cannot be read, or is empty. kInvalidArgument: it
  // is not an IDX file of bytes with `dimensions` dimensions, a dimension is 0, or the file does
  // not have as many values as its header says. The message names the file and the fault.
  static absl::StatusOr<IdxFile> Read(const std::string& path, int dimensions);

  // Parses bytes that were read already. Errors: kInvalidArgument as above. `name` is for messages.
  static absl::StatusOr<IdxFile> Parse(const std::string& name, const std::string& bytes,
                                       int dimensions);
};

}  // namespace ddp::examples

#endif  // DDP_EXAMPLES_DIGITS_IDX_FILE_H_
