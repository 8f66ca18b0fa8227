#ifndef DDP_TESTING_ACCELERATOR_DEVICE_GENERATOR_H_
#define DDP_TESTING_ACCELERATOR_DEVICE_GENERATOR_H_

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace ddp::testing {

// Returns a new generator of `device`: a CPU generator under another name, so that a device and a
// CPU with one seed draw the same numbers.
at::Generator MakeDeviceGenerator(c10::Device device);

// Returns the CPU generator that holds the state of a device's `generator`.
at::Generator CpuGeneratorOf(const at::Generator& generator);

// Returns the generator for operators that are called without one. Lives as long as the process.
const at::Generator& DefaultGenerator(c10::Device device);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_DEVICE_GENERATOR_H_
