// Which operation is over before which: streams, events and the host as vector clocks (Lamport 1978; Mattern 1989).
//
// Kernels of this device run at once, in the order of the program. A real device may run those of two streams in any
// order that the events allow. Clocks decide whether an order is guaranteed, for all schedules at once: no draw of
// schedules is needed, and an error names both operations.
#pragma once
#include <ATen/ATen.h>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define VISIBLE __attribute__((visibility("default")))

namespace cuda_on_host {

using Clock = std::vector<int64_t>;  // by stream: how many of its operations are known to be over

struct Step {  // an operation on the device: the `at`-th of a stream
  int stream;
  int64_t at;
};

VISIBLE int devices();
VISIBLE int current_device();
VISIBLE void set_device(int index);
VISIBLE c10::Stream current_stream(int device);
VISIBLE void set_stream(int device, int64_t id);
VISIBLE c10::Stream new_stream(int device);

// A new operation on `stream`; `use` then says what it reads and writes, and refuses what another stream may still use.
VISIBLE Step step(c10::Stream stream, const std::string& operation);
VISIBLE void use(const at::Tensor& tensor, bool writes, Step step, const std::string& operation);

VISIBLE Clock seen_by(c10::Stream stream);
VISIBLE void stream_waits(c10::Stream stream, const Clock& clock);
VISIBLE void host_waits(const Clock& clock, const std::string& what);  // counted, and refused while it is forbidden
VISIBLE void device_waits(int device);
VISIBLE void before_device_wait(std::function<void()> finish);  // what else has to end: communication

VISIBLE at::Tensor host(const at::Tensor& tensor);  // a CPU tensor over the same bytes
VISIBLE void resize_storage(const at::Tensor& tensor, int64_t bytes);

// What tests ask.
VISIBLE int64_t allocated(int device);
VISIBLE int64_t peak(int device);
VISIBLE void reset_peak(int device);
VISIBLE void set_memory(int device, int64_t bytes);  // more is out of memory; the error lists what is allocated
VISIBLE int64_t memory(int device);
VISIBLE int64_t pinned_bytes();
VISIBLE std::map<std::string, int64_t> waits();
VISIBLE void forbid_waits(bool forbidden);
VISIBLE std::vector<int> contexts();
VISIBLE void make_context(int device);
VISIBLE at::Generator default_generator(int device);

// A faulty device: an operation takes so many seconds more for each byte of its result, or one element of it is wrong.
// Of communication, whose name is "communication", the bytes are those of what this rank gives.
VISIBLE void plant(int device, const std::string& operation, double seconds_per_byte, bool is_wrong);
VISIBLE void suffer(int device, const std::string& operation, const at::Tensor& tensor);

}  // namespace cuda_on_host
