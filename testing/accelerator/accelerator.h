// The simulated devices as devices of LibTorch's, of the type PrivateUse1: tensors, streams, events
// and random numbers as on a GPU, on any machine. A program that is wrong on a GPU for want of an
// order between streams is wrong here too, in nearly every run:
//
//   - The pointer of a device's tensor is no memory of the host's: reading it is a SIGSEGV.
//   - A kernel runs on a stream's thread, later than its launch by a time that the seed chooses.
//   - Freed memory is overwritten, and given to the next tensor of the same stream.
//   - A kernel that fails makes every later call throw.
//
// The kernels are those of LibTorch's CPU. So a right program computes the bits that it computes on
// the CPU, and a test compares them.
//
// testing/accelerator/runtime has the devices themselves, without LibTorch.
#ifndef DDP_TESTING_ACCELERATOR_ACCELERATOR_H_
#define DDP_TESTING_ACCELERATOR_ACCELERATOR_H_

#include <functional>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "testing/accelerator/runtime/runtime.h"

namespace ddp::testing {

// Makes the devices. The first call registers them with LibTorch, for the life of the process; it
// must come before the first backward, for autograd starts a thread for each device that it sees
// then. A later call replaces the devices by new ones with other options. Requires then: no tensor
// of a device is left, and no other thread uses one.
Runtime& InstallAccelerator(const RuntimeOptions& options);

// Returns the installed devices. Requires: InstallAccelerator() was called.
Runtime& Accelerator();

// Returns device `index` in LibTorch's words.
c10::Device SimulatedDevice(int index = 0);

// Returns `stream` in the runtime's words.
StreamPlace PlaceOf(const c10::Stream& stream);
// Returns the current stream of `device`.
StreamPlace CurrentStream(c10::Device device);

// Appends `task` to the current stream of `device`, as a kernel. `name` is for error messages.
void LaunchOn(c10::Device device, const std::string& name, std::function<void()> task);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_ACCELERATOR_H_
