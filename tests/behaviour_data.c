/* Inputs, memory and files of behaviour_digest, and its transport, which copies messages into
 * one list, under one lock. */
#include "tests/behaviour.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "onebit/custom.h"

float input_value(size_t i, int rank, int step) {
  const size_t k = i + (size_t)rank * 7919 + (size_t)step * 104729;
  if (k % 53 == 0 || k / 2503 % 11 == 10)
    return k % 2 ? -0.0f : 0.0f;
  const float coarse = (float)(k * 31 % 1009) - 504.0f, fine = (float)(k * 17 % 97) - 48.0f;
  return (coarse / 504.7f + fine / 9973.0f) * ldexpf(1.0f, (int)(k / 701 % 9) - 6);
}

void store_value(void *buffer, size_t i, onebit_dtype_t dtype, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t exponent = (bits >> 23 & 255) > 112 ? (bits >> 23 & 255) - 112 : 0;
  const uint32_t half = (bits >> 16 & 0x8000) | (exponent > 31 ? 31 : exponent) << 10 |
                        (exponent > 0 && exponent < 31 ? bits >> 13 & 0x3ff : 0);
  if (dtype == ONEBIT_FLOAT32)
    ((float *)buffer)[i] = value;
  else
    ((uint16_t *)buffer)[i] = (uint16_t)(dtype == ONEBIT_BFLOAT16 ? bits >> 16 : half);
}

size_t bytes_of(onebit_dtype_t dtype) { return dtype == ONEBIT_FLOAT32 ? 4 : 2; }

void *allocate_zeros(size_t bytes) {
  void *made = calloc(1, bytes + 64);
  if (!made)
    abort();
  return made;
}

uint64_t digest_files(const char *directory) {
  uint64_t sum = 0;
  DIR *list = opendir(directory);
  for (const struct dirent *entry; list && (entry = readdir(list)) != NULL;) {
    char path[400];
    static char text[1 << 20];
    snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
    FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
    if (!file)
      continue;
    sum += digest_bytes(digest_bytes(DIGEST, entry->d_name, strlen(entry->d_name)), text,
                        fread(text, 1, sizeof text, file));
    fclose(file);
    remove(path);
  }
  if (list)
    closedir(list);
  rmdir(directory);
  return sum;
}

/* ---- The transport ---- */

/* A message in flight, or a pending receive. */
struct message {
  struct message *next;
  int from, to, tag;
  unsigned number; /* index among messages with these ends and this tag */
  size_t bytes;
  void *data;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct message *sent; /* in the order of sending */
static uint64_t sum;
enum { MAX_RANKS = 4, TAGS = 32768, SENT = 0, RECEIVED = 1 };
static unsigned begun[2][MAX_RANKS][MAX_RANKS][TAGS];

uint64_t digest_bytes(uint64_t hash, const void *data, size_t bytes) {
  const unsigned char *byte = data;
  for (size_t i = 0; i < bytes; i++)
    hash = (hash ^ byte[i]) * 0x100000001b3u;
  return hash;
}

uint64_t wire_digest(void) {
  const uint64_t all = sum;
  sum = 0;
  memset(begun, 0, sizeof begun);
  return all;
}

static struct message *message_create(int from, int to, int tag, size_t bytes) {
  struct message *made = malloc(sizeof *made);
  if (!made)
    abort();
  *made = (struct message){.from = from, .to = to, .tag = tag, .bytes = bytes};
  return made;
}

static int send_message(void *context, const void *data, size_t bytes, int peer, int tag,
                        void **operation) {
  struct message *made = message_create((int)(intptr_t)context, peer, tag, bytes);
  const int ends[] = {made->from, peer};
  made->data = malloc(bytes + 1);
  if (!made->data)
    abort();
  memcpy(made->data, data, bytes);
  pthread_mutex_lock(&lock);
  made->number = begun[SENT][made->from][peer][tag]++;
  struct message **last = &sent;
  while (*last)
    last = &(*last)->next;
  *last = made;
  /* Messages of calls begin with O1B1 (docs/wire-format.md); other messages contain paths. */
  if (bytes >= 4 && memcmp(data, "O1B1", 4) == 0)
    sum += digest_bytes(digest_bytes(DIGEST, ends, sizeof ends), data, bytes);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  *operation = NULL;
  return 0;
}

static int receive_message(void *context, void *data, size_t bytes, int peer, int tag,
                           void **operation) {
  struct message *made = message_create(peer, (int)(intptr_t)context, tag, bytes);
  made->data = data;
  pthread_mutex_lock(&lock);
  made->number = begun[RECEIVED][peer][made->to][tag]++;
  pthread_mutex_unlock(&lock);
  *operation = made;
  return 0;
}

/* Returns the link to the sent message with the same ends, tag and number; the caller holds the
 * lock. */
static struct message **find_message(const struct message *wanted) {
  struct message **one = &sent;
  while (*one && ((*one)->from != wanted->from || (*one)->to != wanted->to ||
                  (*one)->tag != wanted->tag || (*one)->number != wanted->number))
    one = &(*one)->next;
  return one;
}

static void wait_for_change(double seconds) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  const long nanoseconds = until.tv_nsec + (long)(seconds * 1e9);
  until.tv_sec += nanoseconds / 1000000000;
  until.tv_nsec = nanoseconds % 1000000000;
  pthread_cond_timedwait(&changed, &lock, &until);
}

static int test_message(void *context, void *operation, double seconds, size_t *bytes) {
  struct message *wanted = operation;
  (void)context;
  pthread_mutex_lock(&lock);
  struct message **place = find_message(wanted), *one = *place;
  if (!one && seconds > 0) {
    wait_for_change(seconds);
    place = find_message(wanted);
    one = *place;
  }
  if (one)
    *place = one->next;
  pthread_mutex_unlock(&lock);
  if (!one)
    return ONEBIT_IN_PROGRESS;
  *bytes = one->bytes;
  memcpy(wanted->data, one->data, one->bytes < wanted->bytes ? one->bytes : wanted->bytes);
  free(one->data);
  free(one);
  free(wanted);
  return 0;
}

static void cancel_message(void *context, void *operation) {
  (void)context;
  free(operation);
}

onebit_comm_t wire_connect(int rank, int size, int hosts) {
  onebit_transport_callbacks_t callbacks = ONEBIT_TRANSPORT_CALLBACKS_INIT;
  onebit_comm_t comm = NULL;
  char host[40];
  snprintf(host, sizeof host, "host %d", rank * hosts / size);
  callbacks.context = (void *)(intptr_t)rank;
  callbacks.send = send_message;
  callbacks.receive = receive_message;
  callbacks.test = test_message;
  callbacks.cancel = cancel_message;
  callbacks.host = host;
  if (onebit_comm_create_custom(&callbacks, rank, size, &comm) != ONEBIT_OK) {
    fprintf(stderr, "behaviour_digest: %s\n", onebit_last_error());
    exit(2);
  }
  return comm;
}
