"""Reads SASS as cuobjdump prints it: kernels, their control flow, and the cheapest path through a loop.

An iteration of a loop executes a path through the loop's basic blocks, from its header back to the
header. A loop has several paths; some of them are for the end of a block or for buffers that are not
aligned. The path to measure moves at least the bytes of an iteration, with the fewest accesses and
the fewest other bytes (check-kernels weighs these). Among equal paths it is the one with the most
floating-point arithmetic, because such a path leaves out no element. If several remain, it is the one
with the fewest instructions, which is the path for whole tiles.
"""
import re

WIDTHS = {'U8': 1, 'S8': 1, 'U16': 2, 'S16': 2, '64': 8, '128': 16}
LINE = re.compile(r'^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;')
FLOATS = re.compile(r'(FADD|FMUL|FFMA|FMNMX|FSETP|MUFU|DADD|DMUL|DFMA|HADD2|HMUL2|HFMA2|HMNMX2)')
MAX_BYTES = 4096  # per lane and iteration; paths that move more are ignored


class Instruction:
    def __init__(self, at, guard, name, operands):
        self.at, self.guard, self.name, self.operands = at, guard, name, operands
        parts = name.split('.')
        self.opcode = parts[0]
        width = next((WIDTHS[part] for part in parts[1:] if part in WIDTHS), 4)
        self.loads = width if self.opcode in ('LDG', 'LD') else 0
        self.stores = width if self.opcode in ('STG', 'ST') else 0
        self.floats = 1 if FLOATS.match(self.opcode) else 0
        self.target = int(operands.split()[-1], 16) if self.opcode == 'BRA' else None

    def falls_through(self):
        if self.opcode == 'BRA':
            return bool(self.guard) or ',' in self.operands
        return self.opcode not in ('EXIT', 'RET') or bool(self.guard)


class Kernel:
    def __init__(self, name):
        self.name, self.code, self.registers, self.shared, self.stack = name, [], 0, 0, 0

    def spills(self):
        return self.stack + sum(i.opcode in ('STL', 'LDL') for i in self.code)


def parse_sass(lines):
    """Parses the output of `cuobjdump -sass -res-usage` to {architecture: {mangled name: Kernel}}."""
    found, arch, kernel = {}, None, None
    for line in lines:
        if line.startswith('arch = '):
            arch = line.split()[-1]
        elif match := re.match(r'\s+Function\s?:?\s*(\w+):?\s*$', line):
            kernels = found.setdefault(arch, {})
            kernel = kernels.setdefault(match[1], Kernel(match[1]))
        elif match := re.match(r'\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)', line):
            kernel.registers, kernel.shared = int(match[1]), int(match[3])
            kernel.stack = int(match[2]) + int(match[4])
        elif match := LINE.match(line):
            if match[3] in ('BRX', 'JMX'):
                raise SystemExit(f'{kernel.name}: a jump by table, which nobody follows here')
            kernel.code.append(Instruction(int(match[1], 16), *match.groups()[1:]))
    return found


class Flow:
    """Basic blocks by number, the blocks that are reached from the first one, and the natural
    loops."""

    def __init__(self, code):
        starts = {0} | {i.target for i in code if i.target is not None}
        starts |= {b.at for a, b in zip(code, code[1:]) if not a.falls_through() or
                   a.opcode in ('BRA', 'EXIT')}
        self.blocks, number = [], {}
        for i in code:
            if i.at in starts:
                number[i.at] = len(self.blocks)
                self.blocks.append([])
            self.blocks[-1].append(i)
        self.next = []
        for n, block in enumerate(self.blocks):
            last, after = block[-1], []
            if last.falls_through() and n + 1 < len(self.blocks):
                after.append(n + 1)
            if last.target is not None:
                after.append(number[last.target])
            self.next.append(after)
        self.order = self.reverse_postorder()
        self.loops = self.find_loops()

    def reverse_postorder(self):
        order, seen, stack = [], {0}, [(0, iter(self.next[0]))]
        while stack:
            block, after = stack[-1]
            for n in after:
                if n not in seen:
                    seen.add(n)
                    stack.append((n, iter(self.next[n])))
                    break
            else:
                order.append(block)
                stack.pop()
        return order[::-1]

    def dominates(self, header, block):
        """Returns true if every path from the first block to `block` passes the header."""
        seen, todo = {header}, [0]
        while todo:
            n = todo.pop()
            if n not in seen:
                seen.add(n)
                todo += self.next[n]
        return block == header or block not in seen

    def find_loops(self):
        """Returns the loops as {header: set of blocks}."""
        rank = {block: n for n, block in enumerate(self.order)}
        before = {block: [b for b in self.order if block in self.next[b]] for block in self.order}
        loops = {}
        for block in self.order:
            for header in self.next[block]:
                if rank[header] > rank[block] or not self.dominates(header, block):
                    continue
                body, todo = loops.setdefault(header, {header}), [block]
                while todo:
                    n = todo.pop()
                    if n not in body:
                        body.add(n)
                        todo += before[n]
        return loops

    def best_paths(self, inside, ends, first=0, trips=1, last=None, weighed=True):
        """Returns {(bytes loaded, bytes stored): (accesses, -floats, instructions, path)} of the best
        paths from `first`, within `inside`, to a block for which `ends` is true. An innermost loop on
        the path runs `trips` times on its most expensive path, unless the loop contains `last`. Other
        loops run once. If not `weighed`, returns only the shortest path, under the key (0, 0)."""
        inner = {h for h, body in self.loops.items() if h in inside and h != first and
                 last not in body and not any(o in body for o in self.loops if o != h)}
        state, done = {first: {(0, 0): (0, 0, 0, None)}}, {}
        for block in self.order:
            if block not in state or block not in inside:
                continue
            code, after = self.blocks[block], self.next[block]
            if block in inner:
                body = self.loops[block]
                code = self.most_expensive_path(block) * trips
                after = [n for b in body for n in self.next[b] if n not in body]
            extended = extend_paths(state[block], code, weighed)
            for n in after or [None]:
                merge_paths(done if ends(n) else state.setdefault(n, {}), extended)
        return done

    def loop_paths(self, header, trips=1):
        return self.best_paths(self.loops[header], lambda n: n == header, header, trips)

    def most_expensive_path(self, header):
        paths = self.loop_paths(header)
        best = min(paths, key=lambda key: (-sum(key), *paths[key][:3]))
        return flatten_path(paths[best][3])

    def shortest_path(self, first, last):
        """Returns the shortest path to the block `last`, or to the end if `last` is None."""
        paths = self.best_paths(set(self.order), lambda n: n == last, first, 1, last, False)
        return flatten_path(paths[0, 0][3]) if paths else []


def extend_paths(paths, code, weighed):
    counted = code if weighed else []
    loads, stores = sum(i.loads for i in counted), sum(i.stores for i in counted)
    floats = sum(i.floats for i in counted)
    accesses = sum(bool(i.loads or i.stores) for i in counted)
    return {(loaded + loads, stored + stores):
            (some + accesses, less - floats, count + len(code), (path, code))
            for (loaded, stored), (some, less, count, path) in paths.items()
            if loaded + loads + stored + stores <= MAX_BYTES}


def merge_paths(into, paths):
    for key, value in paths.items():
        if key not in into or value[:3] < into[key][:3]:
            into[key] = value


def flatten_path(path):
    parts = []
    while path:
        path, code = path
        parts.append(code)
    return [i for code in reversed(parts) for i in code]
