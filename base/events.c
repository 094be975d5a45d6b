/* TensorBoard's event files. */
#include "base/events.h"

#include <string.h>

/* Of a value: two tags with lengths, a name with its tag and length, a float with its tag. */
enum { VALUE_BYTES = 4 + 2 + OB_EVENTS_NAME + 5, BYTES = 64 + OB_EVENTS_VALUES * VALUE_BYTES };

/* Tags of protocol buffers: the number of a field, times 8, and how it is written. */
enum {
  EVENT_TIME = 1 << 3 | 1,
  EVENT_STEP = 2 << 3,
  EVENT_VERSION = 3 << 3 | 2,
  EVENT_SUMMARY = 5 << 3 | 2,
  SUMMARY_VALUE = 1 << 3 | 2,
  VALUE_TAG = 1 << 3 | 2,
  VALUE_SIMPLE = 2 << 3 | 5
};

struct bytes {
  unsigned char data[BYTES];
  size_t count;
};

static void put_byte(struct bytes *to, unsigned byte) {
  to->data[to->count++] = (unsigned char)byte;
}

static void put_fixed(struct bytes *to, uint64_t number, int size) {
  for (int k = 0; k < size; k++)
    put_byte(to, number >> (8 * k) & 0xff);
}

static void put_varint(struct bytes *to, uint64_t number) {
  for (; number >= 0x80; number >>= 7)
    put_byte(to, 0x80 | (number & 0x7f));
  put_byte(to, (unsigned)number);
}

static void put_bytes(struct bytes *to, unsigned tag, const void *data, size_t count) {
  put_byte(to, tag);
  put_varint(to, count);
  memcpy(to->data + to->count, data, count);
  to->count += count;
}

static void put_double(struct bytes *to, unsigned tag, double number) {
  uint64_t bits;
  memcpy(&bits, &number, sizeof bits);
  put_byte(to, tag);
  put_fixed(to, bits, 8);
}

static void put_float(struct bytes *to, unsigned tag, float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  put_byte(to, tag);
  put_fixed(to, bits, 4);
}

/* CRC-32C (Castagnoli), reflected, and masked as the format has it: a checksum of bytes that hold
 * checksums would be weak. */
static uint32_t checksum(const unsigned char *data, size_t count) {
  uint32_t sum = ~0U;
  for (size_t k = 0; k < count; k++) {
    sum ^= data[k];
    for (int bit = 0; bit < 8; bit++)
      sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78U : 0);
  }
  sum = ~sum;
  return (sum >> 15 | sum << 17) + 0xa282ead8U;
}

static bool write_record(FILE *file, const struct bytes *event) {
  struct bytes head = {.count = 0}, tail = {.count = 0};
  put_fixed(&head, event->count, 8);
  put_fixed(&head, checksum(head.data, head.count), 4);
  put_fixed(&tail, checksum(event->data, event->count), 4);
  return fwrite(head.data, head.count, 1, file) == 1 &&
         fwrite(event->data, event->count, 1, file) == 1 &&
         fwrite(tail.data, tail.count, 1, file) == 1 && fflush(file) == 0;
}

bool ob_events_begin(FILE *file, double now) {
  static const char version[] = "brain.Event:2";
  struct bytes event = {.count = 0};
  put_double(&event, EVENT_TIME, now);
  put_bytes(&event, EVENT_VERSION, version, sizeof version - 1);
  return write_record(file, &event);
}

bool ob_events_write(FILE *file, double now, uint64_t step, const char *const *names,
                     const double *values, size_t count) {
  struct bytes event = {.count = 0}, summary = {.count = 0};
  for (size_t k = 0; k < count; k++) {
    struct bytes value = {.count = 0};
    put_bytes(&value, VALUE_TAG, names[k], strlen(names[k]));
    put_float(&value, VALUE_SIMPLE, (float)values[k]);
    put_bytes(&summary, SUMMARY_VALUE, value.data, value.count);
  }
  put_double(&event, EVENT_TIME, now);
  put_byte(&event, EVENT_STEP);
  put_varint(&event, step);
  put_bytes(&event, EVENT_SUMMARY, summary.data, summary.count);
  return write_record(file, &event);
}
