/*
 * onebit-relay: carries packets between network namespaces, each with a TUN device, over links with
 * a rate, a delay and losses (network.h). tools/netlab uses it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <linux/if.h>
#include <linux/if_tun.h>

#include "tools/options.h"
#include "tools/relay/network.h"

enum { DONE = 0, FAILED = 1 }; /* exit statuses, besides TOOL_USAGE */
enum { HOSTS = 254, LONGEST = 65535, TURN = 64 /* packets read from a host in one turn */ };

struct options {
  double delay, loss;
  size_t queue;
  size_t seed;
  const char *interface;
};

struct relay {
  struct relay_network network;
  struct pollfd files[HOSTS + 1]; /* the devices of the hosts, and the standard input */
  uint32_t addresses[HOSTS];      /* the hosts' addresses, in network byte order */
  char line[128];                 /* the command that is being read */
  size_t line_bytes;
};

#define AT(field) offsetof(struct options, field)

static const struct tool_option rows[] = {
    {"delay", 0, TOOL_SECONDS, AT(delay), "TIME",
     "time of a packet from one link to another, e.g. 40ms", .high = 60},
    {"loss", 0, TOOL_REAL, AT(loss), "P", "percent of all packets that are lost by chance",
     .high = 100},
    {"queue", 0, TOOL_SIZE, AT(queue), "BYTES",
     "bytes that may wait in each direction of a link (1M); more are lost", .low = 1},
    {"seed", 0, TOOL_COUNT, AT(seed), "N", "seed of the random losses; default 1", .low = 0},
    {"interface", 0, TOOL_TEXT, AT(interface), "NAME", "name of the devices (eth0)", .low = 0},
    {0},
};

static const struct tool tool = {
    .name = "onebit-relay",
    .usage = "onebit-relay [OPTION...] NAMESPACE=ADDRESS=RATE...",
    .purpose =
        "Carries IPv4 packets between network namespaces through links with a rate, a delay and\n"
        "losses. Each NAMESPACE, a file such as /run/netns/NAME, gets a TUN device, which is to\n"
        "be given ADDRESS; its link sends and receives at RATE: 10mbit, or none: no limit.\n",
    .options = rows,
    .notes = "Prints \"ready\" when all devices exist, and ends when its standard input ends. It "
             "reads\ncommands there, and answers each one with \"ok\" or with a line that names "
             "the error:\n  rate N RATE           sets the rate of the N-th host's link\n  vanish "
             "N, return N    stops all packets from and to the N-th host, or lets them pass "
             "again\n  down N, up N          does the same, but the host notices it, as it notices "
             "a pulled cable\nNeeds root. The model: a packet waits until earlier packets have "
             "left the sender's link at\nits rate, takes the delay, may be lost by chance, and "
             "waits for the receiver's link. Each\ndirection of a link has a queue. There is no "
             "jitter, no burst of losses, and no reordering.\n",
    .operands = true,
};

static uint64_t read_nanoseconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* --- Devices -----------------------------------------------------------------------------------*/

/* Creates a TUN device in a namespace, and returns to the namespace `own`. Returns the device's
 * file descriptor, or -1. */
static int create_device(const char *namespace, const char *name, int own) {
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
  snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
  int in = open(namespace, O_RDONLY | O_CLOEXEC), file = -1;
  if (in >= 0 && setns(in, CLONE_NEWNET) == 0) {
    file = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (file >= 0 && ioctl(file, TUNSETIFF, &request) != 0) {
      close(file);
      file = -1;
    }
  }
  if (file < 0)
    tool_print_error(tool.name, "%s: cannot create the TUN device %s: %s", namespace, name,
                     strerror(errno));
  if (in >= 0)
    close(in);
  if (setns(own, CLONE_NEWNET) != 0)
    return -1;
  return file;
}

static bool parse_rate(const char *text, double *rate) {
  *rate = 0;
  return strcmp(text, "none") == 0 || (tool_read_quantity(text, TOOL_RATE, rate) && *rate > 0);
}

/* Parses NAMESPACE=ADDRESS=RATE. If the text is valid, ends it after NAMESPACE. */
static bool parse_host(struct relay *relay, int host, char *text, char wrong[TOOL_ERROR]) {
  char *rate = strrchr(text, '='), *at = rate ? memrchr(text, '=', (size_t)(rate - text)) : NULL;
  char address[INET_ADDRSTRLEN] = "";
  if (at)
    snprintf(address, sizeof address, "%.*s", (int)(rate - at - 1), at + 1);
  if (!at || !parse_rate(rate + 1, &relay->network.links[host].bytes_per_second) ||
      inet_pton(AF_INET, address, &relay->addresses[host]) != 1) {
    snprintf(wrong, TOOL_ERROR, "%.100s: not NAMESPACE=ADDRESS=RATE", text);
    return false;
  }
  *at = '\0';
  return true;
}

/* --- Packets -----------------------------------------------------------------------------------*/

static int find_destination(const struct relay *relay, const unsigned char *packet) {
  uint32_t address;
  memcpy(&address, packet + 16, sizeof address); /* the destination address in an IPv4 header */
  for (int host = 0; host < relay->network.hosts; host++)
    if (relay->addresses[host] == address)
      return host;
  return -1;
}

static void forward_packets(struct relay *relay, int host) {
  static unsigned char packet[LONGEST];
  for (int i = 0; i < TURN; i++) {
    ssize_t bytes = read(relay->files[host].fd, packet, sizeof packet);
    if (bytes <= 0)
      return;
    int to = bytes >= 20 && packet[0] >> 4 == 4 ? find_destination(relay, packet) : -1;
    if (to >= 0)
      relay_network_send(&relay->network, host, to, packet, (size_t)bytes, read_nanoseconds());
  }
}

static void write_packets(struct relay *relay) {
  struct relay_packet *packet;
  while ((packet = relay_network_receive(&relay->network, read_nanoseconds())) != NULL) {
    (void)!write(relay->files[packet->to].fd, packet->data, packet->bytes);
    free(packet);
  }
}

/* --- Commands ----------------------------------------------------------------------------------*/

static void set_carrier(const struct relay *relay, int host, int carrier) {
  ioctl(relay->files[host].fd, TUNSETCARRIER, &carrier);
}

/* Runs a command. Returns NULL, or an error message. */
static const char *run_command(struct relay *relay, const char *line) {
  char verb[16] = "", rate[32] = "";
  int host = 0, read = sscanf(line, "%15s %d %31s", verb, &host, rate);
  if (read < 2 || host < 1 || host > relay->network.hosts)
    return "no command, or no such host";
  struct relay_link *link = &relay->network.links[host - 1];
  bool down = strcmp(verb, "down") == 0, up = strcmp(verb, "up") == 0;
  if (strcmp(verb, "rate") == 0)
    return read == 3 && parse_rate(rate, &link->bytes_per_second) ? NULL : "no rate";
  if (!down && !up && strcmp(verb, "vanish") != 0 && strcmp(verb, "return") != 0)
    return "no such command";
  link->vanished = down || strcmp(verb, "vanish") == 0;
  if (down || up)
    set_carrier(relay, host - 1, up);
  return NULL;
}

/* Reads and runs commands. Returns false if the input has ended. */
static bool read_commands(struct relay *relay) {
  char *line = relay->line, *end;
  ssize_t bytes =
      read(STDIN_FILENO, line + relay->line_bytes, sizeof relay->line - 1 - relay->line_bytes);
  if (bytes <= 0)
    return bytes < 0 && errno == EINTR;
  relay->line_bytes += (size_t)bytes;
  line[relay->line_bytes] = '\0';
  while ((end = strchr(line, '\n')) != NULL || relay->line_bytes == sizeof relay->line - 1) {
    size_t length = end ? (size_t)(end - line) + 1 : relay->line_bytes;
    if (end)
      *end = '\0';
    const char *wrong = run_command(relay, line);
    puts(wrong ? wrong : "ok");
    fflush(stdout);
    relay->line_bytes -= length;
    memmove(line, line + length, relay->line_bytes + 1);
  }
  return true;
}

/* --- The program -------------------------------------------------------------------------------*/

static void run_relay(struct relay *relay) {
  const int hosts = relay->network.hosts;
  relay->files[hosts] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
  for (bool open = true; open;) {
    uint64_t next = relay_network_next_time(&relay->network), time = read_nanoseconds();
    uint64_t left = next == RELAY_NEVER ? 1000000000u : next > time ? next - time : 0;
    struct timespec wait = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
    if (ppoll(relay->files, (nfds_t)hosts + 1, &wait, NULL) > 0) {
      for (int host = 0; host < hosts; host++)
        if (relay->files[host].revents)
          forward_packets(relay, host);
      open = !relay->files[hosts].revents || read_commands(relay);
    }
    write_packets(relay);
  }
}

/* Creates all devices. On failure prints an error message and returns false. */
static bool create_devices(struct relay *relay, char **hosts, const struct options *options) {
  int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), host = 0;
  bool well = own >= 0;
  relay->network.delay = (uint64_t)(options->delay * 1e9);
  relay->network.loss = options->loss / 100;
  relay->network.queue = options->queue;
  relay->network.seed = options->seed;
  for (; well && *hosts; hosts++, host++) {
    int device = create_device(*hosts, options->interface, own);
    relay->files[host] = (struct pollfd){.fd = device, .events = POLLIN};
    well = device >= 0;
  }
  close(own);
  return well;
}

int main(int argc, char **argv) {
  static struct relay relay;
  struct options options = {.queue = 1 << 20, .seed = 1, .interface = "eth0"};
  char wrong[TOOL_ERROR];
  enum tool_asked asked = tool_parse(&tool, &argc, argv, &options, wrong);
  if (asked == TOOL_RUN && (argc < 2 || argc > HOSTS + 1)) {
    snprintf(wrong, sizeof wrong, "%d hosts: expected 1 to %d", argc - 1, HOSTS);
    asked = TOOL_WRONG;
  }
  if (asked != TOOL_RUN)
    return tool_print_answer(&tool, asked, wrong);
  if (!relay_network_create(&relay.network, argc - 1))
    return FAILED;
  for (int host = 0; host + 1 < argc; host++)
    if (!parse_host(&relay, host, argv[host + 1], wrong))
      return tool_print_answer(&tool, TOOL_WRONG, wrong);
  if (!create_devices(&relay, argv + 1, &options))
    return FAILED;
  /* If permitted, gives the relay a higher priority than the programs whose packets it carries. */
  (void)setpriority(PRIO_PROCESS, 0, -10);
  puts("ready");
  fflush(stdout);
  run_relay(&relay);
  relay_network_destroy(&relay.network);
  return DONE;
}
