//! [`StubLibrary`] writes a shared library of stubs as an ELF file for x86-64.
//!
//! A stub can replace any function. It leaves all arguments in place, loads the address of its descriptor into a register that no
//! argument uses, and jumps to the core library, which answers the call. The descriptor begins with the function's name.
//!
//! The file has three parts, each mapped at its file offset: read-only data, the stubs, and writable data (`.dynamic`, the
//! address of the core's function, and the descriptors).

use object::Endianness;
use object::elf;
use object::write::StringId;
use object::write::elf::{FileHeader, ProgramHeader, Rel, SectionHeader, SectionIndex, Sym, Verdef, Writer};

/// The core's function that every stub jumps to.
pub const ANSWER: &str = "harness_gpu_unmodelled";

/// A symbol of a library, with the version node of its references.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Symbol {
    pub name: String,
    /// Its version node, if it has one.
    pub node: Option<String>,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Function,
    Variable,
}

/// A library to be written.
#[derive(Clone, Debug)]
pub struct StubLibrary<'a> {
    pub soname: &'a str,
    /// The version nodes that it defines, including those without symbols.
    pub nodes: Vec<&'a str>,
    pub symbols: Vec<&'a Symbol>,
    /// File name of the core library in the same folder.
    pub core: &'a str,
}

const PAGE: usize = 4096;
const STUB: usize = 16;
/// `struct Stub { name: *const c_char, known: AtomicPtr<()> }` of the core.
const DESCRIPTOR: usize = 16;
/// Space for a variable, larger than any imported one.
const VARIABLE: usize = 64;
const BLOOM_SHIFT: u32 = 6;

impl StubLibrary<'_> {
    /// Returns the file's contents.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // Sizes and offsets first, then the same parts in the same order.
        let mut writer = Writer::new(Endianness::Little, true, &mut bytes);
        let plan = Plan::new(self, &mut writer);
        plan.write(&mut writer);
        bytes
    }
}

/// Symbols in file order: sorted by bucket, as the hash table requires.
struct Hashed<'a> {
    symbol: &'a Symbol,
    hash: u32,
}

/// File offsets of all parts.
struct Plan<'a> {
    symbols: Vec<Hashed<'a>>,
    nodes: Vec<&'a str>,
    buckets: u32,
    bloom: u32,
    strings: Strings,
    names: Names,
    sections: Sections,
    offsets: Offsets,
}

struct Strings {
    soname: StringId,
    core: StringId,
    origin: StringId,
    answer: StringId,
    nodes: Vec<StringId>,
    symbols: Vec<StringId>,
}

/// Section names that the writer does not provide.
struct Names {
    rodata: StringId,
    text: StringId,
    got: StringId,
    data: StringId,
    rela: StringId,
}

struct Sections {
    text: SectionIndex,
    data: SectionIndex,
}

#[derive(Default)]
struct Offsets {
    hash: usize,
    symbols: usize,
    strings: usize,
    versions: usize,
    definitions: usize,
    relocations: usize,
    rodata: usize,
    text: usize,
    dynamic: usize,
    got: usize,
    data: usize,
    end: usize,
}

impl<'a> Plan<'a> {
    fn new(library: &'a StubLibrary<'a>, writer: &mut Writer<'a>) -> Self {
        let count = library.symbols.len() as u32;
        let buckets = (count / 4).max(1);
        let bloom = (count / 8).next_power_of_two();
        let hashed = library.symbols.iter().map(|symbol| Hashed { symbol, hash: elf::gnu_hash(symbol.name.as_bytes()) });
        let mut symbols: Vec<_> = hashed.collect();
        symbols.sort_by_key(|hashed| (hashed.hash % buckets, hashed.symbol));
        let strings = Strings {
            soname: writer.add_dynamic_string(library.soname.as_bytes()),
            core: writer.add_dynamic_string(library.core.as_bytes()),
            origin: writer.add_dynamic_string(b"$ORIGIN"),
            answer: writer.add_dynamic_string(ANSWER.as_bytes()),
            nodes: library.nodes.iter().map(|node| writer.add_dynamic_string(node.as_bytes())).collect(),
            symbols: symbols.iter().map(|hashed| writer.add_dynamic_string(hashed.symbol.name.as_bytes())).collect(),
        };
        let names = Names {
            rodata: writer.add_section_name(b".rodata"),
            text: writer.add_section_name(b".text"),
            got: writer.add_section_name(b".got"),
            data: writer.add_section_name(b".data"),
            rela: writer.add_section_name(b".rela.dyn"),
        };
        let mut plan = Self {
            symbols,
            nodes: library.nodes.clone(),
            buckets,
            bloom,
            strings,
            names,
            sections: Self::sections(writer, !library.nodes.is_empty()),
            offsets: Offsets::default(),
        };
        plan.offsets = plan.offsets(writer);
        plan
    }

    fn functions(&self) -> impl Iterator<Item = &Hashed<'a>> {
        self.symbols.iter().filter(|hashed| hashed.symbol.kind == Kind::Function)
    }

    /// Returns the size of the functions' names, each with a final zero.
    fn name_bytes(&self) -> usize {
        self.functions().map(|hashed| hashed.symbol.name.len() + 1).sum()
    }

    fn has_stubs(&self) -> bool {
        self.functions().next().is_some()
    }

    /// In the order of the section headers.
    fn sections(writer: &mut Writer<'a>, has_versions: bool) -> Sections {
        writer.reserve_null_section_index();
        writer.reserve_gnu_hash_section_index();
        writer.reserve_dynsym_section_index();
        writer.reserve_dynstr_section_index();
        if has_versions {
            writer.reserve_gnu_versym_section_index();
            writer.reserve_gnu_verdef_section_index();
        }
        for _ in ["relocations", "rodata"] {
            writer.reserve_section_index();
        }
        let text = writer.reserve_section_index();
        writer.reserve_dynamic_section_index();
        writer.reserve_section_index();
        let data = writer.reserve_section_index();
        writer.reserve_shstrtab_section_index();
        Sections { text, data }
    }

    fn offsets(&self, writer: &mut Writer<'a>) -> Offsets {
        let mut at = Offsets::default();
        let stubs = self.functions().count();
        let count = self.symbols.len();
        writer.reserve_file_header();
        writer.reserve_program_headers(5);
        at.hash = writer.reserve_gnu_hash(self.bloom, self.buckets, count as u32);
        writer.reserve_null_dynamic_symbol_index();
        for _ in 0..count + usize::from(self.has_stubs()) {
            writer.reserve_dynamic_symbol_index();
        }
        at.symbols = writer.reserve_dynsym();
        at.strings = writer.reserve_dynstr();
        if !self.nodes.is_empty() {
            at.versions = writer.reserve_gnu_versym();
            let definitions = self.nodes.len() + 1;
            at.definitions = writer.reserve_gnu_verdef(definitions, definitions);
        }
        at.relocations = writer.reserve_relocations(self.relocations(), true);
        at.rodata = writer.reserve(self.name_bytes(), 1);
        at.text = writer.reserve(stubs * STUB, PAGE);
        writer.reserve(0, PAGE);
        at.dynamic = writer.reserve_dynamic(self.dynamic_entries());
        at.got = writer.reserve(8 * usize::from(self.has_stubs()), 8);
        at.data = writer.reserve(stubs * DESCRIPTOR + (count - stubs) * VARIABLE, VARIABLE);
        at.end = writer.reserved_len();
        writer.reserve_shstrtab();
        writer.reserve_section_headers();
        at
    }

    /// One for each name, and one for the address of the core's function.
    fn relocations(&self) -> usize {
        self.functions().count() + usize::from(self.has_stubs())
    }

    const fn dynamic_entries(&self) -> usize {
        13 + 3 * !self.nodes.is_empty() as usize
    }

    fn write(&self, writer: &mut Writer<'a>) {
        let header = FileHeader { os_abi: 0, abi_version: 0, e_type: elf::ET_DYN, e_machine: elf::EM_X86_64, e_entry: 0, e_flags: 0 };
        writer.write_file_header(&header).expect("a stub library has few sections");
        self.write_program_headers(writer);
        let first = 1 + u32::from(self.has_stubs());
        let hash = |index: u32| self.symbols[index as usize].hash;
        writer.write_gnu_hash(first, BLOOM_SHIFT, self.bloom, self.buckets, self.symbols.len() as u32, hash);
        self.write_symbols(writer);
        writer.write_dynstr();
        self.write_versions(writer);
        self.write_relocations(writer);
        for function in self.functions() {
            writer.write(function.symbol.name.as_bytes());
            writer.write(&[0]);
        }
        self.write_stubs(writer);
        self.write_dynamic(writer);
        // Descriptors, variables and the address are zero until the loader relocates them.
        writer.pad_until(self.offsets.end);
        writer.write_shstrtab();
        self.write_section_headers(writer);
    }

    fn write_program_headers(&self, writer: &mut Writer<'a>) {
        let at = &self.offsets;
        writer.write_align_program_headers();
        let mut part = |p_type: u32, p_flags: u32, from: usize, to: usize, align: usize| {
            let (from, size) = (from as u64, (to - from) as u64);
            let header = ProgramHeader {
                p_type,
                p_flags,
                p_offset: from,
                p_vaddr: from,
                p_paddr: from,
                p_filesz: size,
                p_memsz: size,
                p_align: align as u64,
            };
            writer.write_program_header(&header);
        };
        let stubs = at.text + self.functions().count() * STUB;
        part(elf::PT_LOAD, elf::PF_R, 0, at.text, PAGE);
        part(elf::PT_LOAD, elf::PF_R | elf::PF_X, at.text, stubs, PAGE);
        part(elf::PT_LOAD, elf::PF_R | elf::PF_W, at.dynamic, at.end, PAGE);
        part(elf::PT_DYNAMIC, elf::PF_R | elf::PF_W, at.dynamic, at.dynamic + self.dynamic_entries() * 16, 8);
        // Without this header the stack would be executable.
        part(elf::PT_GNU_STACK, elf::PF_R | elf::PF_W, 0, 0, 16);
    }

    fn write_symbols(&self, writer: &mut Writer<'a>) {
        writer.write_null_dynamic_symbol();
        let global = |kind: u8| (elf::STB_GLOBAL << 4) | kind;
        if self.has_stubs() {
            writer.write_dynamic_symbol(&Sym {
                name: Some(self.strings.answer),
                section: None,
                st_info: global(elf::STT_NOTYPE),
                st_other: 0,
                st_shndx: elf::SHN_UNDEF,
                st_value: 0,
                st_size: 0,
            });
        }
        let (mut stub, mut variable) = (self.offsets.text, self.variables());
        for (hashed, name) in self.symbols.iter().zip(&self.strings.symbols) {
            let (place, section, kind, size) = match hashed.symbol.kind {
                Kind::Function => (&mut stub, self.sections.text, elf::STT_FUNC, STUB),
                Kind::Variable => (&mut variable, self.sections.data, elf::STT_OBJECT, VARIABLE),
            };
            let value = std::mem::replace(place, *place + size);
            writer.write_dynamic_symbol(&Sym {
                name: Some(*name),
                section: Some(section),
                st_info: global(kind),
                st_other: 0,
                st_shndx: 0,
                st_value: value as u64,
                st_size: size as u64,
            });
        }
    }

    /// Returns the offset of the variables, after the descriptors.
    fn variables(&self) -> usize {
        self.offsets.data + self.functions().count() * DESCRIPTOR
    }

    fn write_versions(&self, writer: &mut Writer<'a>) {
        if self.nodes.is_empty() {
            return;
        }
        writer.write_null_gnu_versym();
        if self.has_stubs() {
            writer.write_gnu_versym(elf::VER_NDX_GLOBAL);
        }
        for hashed in &self.symbols {
            let node = hashed.symbol.node.as_deref().and_then(|node| self.nodes.iter().position(|defined| *defined == node));
            writer.write_gnu_versym(node.map_or(elf::VER_NDX_GLOBAL, |index| index as u16 + 2));
        }
        writer.write_align_gnu_verdef();
        let mut define = |flags: u16, index: u16, name: StringId| {
            writer.write_gnu_verdef(&Verdef { version: elf::VER_DEF_CURRENT, flags, index, aux_count: 1, name });
        };
        define(elf::VER_FLG_BASE, 1, self.strings.soname);
        for (index, node) in self.strings.nodes.iter().enumerate() {
            define(0, index as u16 + 2, *node);
        }
    }

    fn write_relocations(&self, writer: &mut Writer<'a>) {
        writer.write_align_relocation();
        let mut name = self.offsets.rodata;
        // Relative relocations come first, as DT_RELACOUNT requires.
        for (index, function) in self.functions().enumerate() {
            let r_offset = (self.offsets.data + index * DESCRIPTOR) as u64;
            writer.write_relocation(true, &Rel { r_offset, r_sym: 0, r_type: elf::R_X86_64_RELATIVE, r_addend: name as i64 });
            name += function.symbol.name.len() + 1;
        }
        if self.has_stubs() {
            let r_offset = self.offsets.got as u64;
            writer.write_relocation(true, &Rel { r_offset, r_sym: 1, r_type: elf::R_X86_64_GLOB_DAT, r_addend: 0 });
        }
    }

    fn write_stubs(&self, writer: &mut Writer<'a>) {
        writer.write_align(PAGE);
        for index in 0..self.functions().count() {
            let stub = self.offsets.text + index * STUB;
            let descriptor = self.offsets.data + index * DESCRIPTOR;
            // Both targets follow the stubs within a few pages, so the distances are small and positive.
            let (to_descriptor, to_answer) = ((descriptor - (stub + 7)) as u32, (self.offsets.got - (stub + 13)) as u32);
            writer.write(&[0x4c, 0x8d, 0x1d]); // lea r11, [rip + …]
            writer.write(&to_descriptor.to_le_bytes());
            writer.write(&[0xff, 0x25]); // jmp [rip + …]
            writer.write(&to_answer.to_le_bytes());
            writer.write(&[0xcc; 3]);
        }
        writer.pad_until(self.offsets.dynamic);
    }

    fn write_dynamic(&self, writer: &mut Writer<'a>) {
        let at = &self.offsets;
        writer.write_dynamic_string(elf::DT_NEEDED, self.strings.core);
        writer.write_dynamic_string(elf::DT_SONAME, self.strings.soname);
        // Not DT_RUNPATH: LD_LIBRARY_PATH takes precedence over it and may contain another core.
        writer.write_dynamic_string(elf::DT_RPATH, self.strings.origin);
        writer.write_dynamic(elf::DT_GNU_HASH, at.hash as u64);
        writer.write_dynamic(elf::DT_STRTAB, at.strings as u64);
        writer.write_dynamic(elf::DT_SYMTAB, at.symbols as u64);
        let strings = writer.dynstr_len() as u64;
        writer.write_dynamic(elf::DT_STRSZ, strings);
        writer.write_dynamic(elf::DT_SYMENT, 24);
        writer.write_dynamic(elf::DT_RELA, at.relocations as u64);
        writer.write_dynamic(elf::DT_RELASZ, self.relocations() as u64 * 24);
        writer.write_dynamic(elf::DT_RELAENT, 24);
        writer.write_dynamic(elf::DT_RELACOUNT, self.functions().count() as u64);
        if !self.nodes.is_empty() {
            writer.write_dynamic(elf::DT_VERSYM, at.versions as u64);
            writer.write_dynamic(elf::DT_VERDEF, at.definitions as u64);
            writer.write_dynamic(elf::DT_VERDEFNUM, self.nodes.len() as u64 + 1);
        }
        writer.write_dynamic(elf::DT_NULL, 0);
    }

    fn write_section_headers(&self, writer: &mut Writer<'a>) {
        let at = &self.offsets;
        writer.write_null_section_header();
        writer.write_gnu_hash_section_header(at.hash as u64);
        writer.write_dynsym_section_header(at.symbols as u64, 1);
        writer.write_dynstr_section_header(at.strings as u64);
        if !self.nodes.is_empty() {
            writer.write_gnu_versym_section_header(at.versions as u64);
            writer.write_gnu_verdef_section_header(at.definitions as u64);
        }
        let dynsym = writer.dynsym_index();
        let section = |writer: &mut Writer<'a>, name: StringId, flags: u32, from: usize, size: usize, align: usize| {
            let is_relocations = name == self.names.rela;
            writer.write_section_header(&SectionHeader {
                name: Some(name),
                sh_type: if is_relocations { elf::SHT_RELA } else { elf::SHT_PROGBITS },
                sh_flags: u64::from(elf::SHF_ALLOC | flags),
                sh_addr: from as u64,
                sh_offset: from as u64,
                sh_size: size as u64,
                sh_link: if is_relocations { dynsym.0 } else { 0 },
                sh_info: 0,
                sh_addralign: align as u64,
                sh_entsize: if is_relocations { 24 } else { 0 },
            });
        };
        let names = &self.names;
        section(writer, names.rela, 0, at.relocations, self.relocations() * 24, 8);
        section(writer, names.rodata, 0, at.rodata, self.name_bytes(), 1);
        section(writer, names.text, elf::SHF_EXECINSTR, at.text, self.functions().count() * STUB, STUB);
        writer.write_dynamic_section_header(at.dynamic as u64);
        section(writer, names.got, elf::SHF_WRITE, at.got, 8 * usize::from(self.has_stubs()), 8);
        section(writer, names.data, elf::SHF_WRITE, at.data, at.end - at.data, VARIABLE);
        writer.write_shstrtab_section_header();
    }
}

#[cfg(test)]
mod tests;
