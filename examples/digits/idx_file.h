#ifndef DDP_EXAMPLES_DIGITS_IDX_FILE_H_
#define DDP_EXAMPLES_DIGITS_IDX_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace ddp::examples {

// A file in the IDX format of MNIST with unsigned bytes: two zero bytes, the type 0x08, the number
// of dimensions, each dimension as a big-endian 32-bit number, then the values, row by row.
struct IdxFile {
  std::vector<int64_t> shape;
  std::vector<uint8_t> values;  // as many as the product of the shape

  // Reads the file at `path`. Throws std::runtime_error, which names the file and the fault, when
  // the file cannot be read, is no IDX file of bytes with `dimensions` dimensions, has a dimension
  // of 0, or has another number of values than its header states.
  static IdxFile Read(const std::string& path, int dimensions);

  // Parses bytes that were read already. Throws as Read(). `name` is for messages.
  static IdxFile Parse(const std::string& name, const std::string& bytes, int dimensions);
};

}  // namespace ddp::examples

#endif  // DDP_EXAMPLES_DIGITS_IDX_FILE_H_
