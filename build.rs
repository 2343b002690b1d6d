//! Generates the gRPC types from `proto/` without a system `protoc`.
//!
//! The keys and values of descriptor entries are `string` on the wire's paper and `bytes` here: a `string` field makes
//! the decoder refuse what is not UTF-8, and Envoy lets a request pass whose decision failed. The wire format of the two
//! is the same. Reflection and JSON use the descriptors as they are written in `proto/`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    #[cfg(feature = "server")]
    protocol::generate()?;
    Ok(())
}

#[cfg(feature = "server")]
mod protocol {
    use std::error::Error;
    use std::path::PathBuf;

    use prost_types::field_descriptor_proto::Type;
    use prost_types::{DescriptorProto, FileDescriptorSet};

    const SERVICE: &str = "envoy/service/ratelimit/v3/rls.proto";
    /// The protocol of a control plane that sends rules. No service of this process speaks it, so it is not part of reflection.
    const RULES: [&str; 2] = ["envoy/service/discovery/v3/ads.proto", "ratelimit/config/ratelimit/v3/rls_conf.proto"];
    const DESCRIPTOR_FILE: &str = "envoy/extensions/common/ratelimit/v3/ratelimit.proto";
    const ENTRY: &str = ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry";

    pub fn generate() -> Result<(), Box<dyn Error>> {
        #[expect(clippy::disallowed_methods, reason = "how cargo tells a build script its directory")]
        let out = PathBuf::from(std::env::var("OUT_DIR")?);

        let mut compiler = protox::Compiler::new(["proto"])?;
        compiler.include_imports(true).open_files([SERVICE])?;
        std::fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;

        compiler.open_files(RULES)?;
        let mut files = compiler.file_descriptor_set();
        let patched = entries_as_bytes(&mut files);
        assert_eq!(patched, 2, "the key and the value of an entry are the two fields to patch in {DESCRIPTOR_FILE}");

        tonic_prost_build::configure().bytes(ENTRY).include_file("protocol.rs").compile_fds(files)?;
        Ok(())
    }

    fn entries_as_bytes(files: &mut FileDescriptorSet) -> usize {
        let mut patched = 0;
        for file in files.file.iter_mut().filter(|file| file.name() == DESCRIPTOR_FILE) {
            for entry in
                nested(&mut file.message_type, "RateLimitDescriptor").filter(|message| message.name() == "Entry")
            {
                for field in entry.field.iter_mut().filter(|field| field.r#type() == Type::String) {
                    field.set_type(Type::Bytes);
                    patched += 1;
                }
            }
        }
        patched
    }

    fn nested<'a>(messages: &'a mut [DescriptorProto], name: &'a str) -> impl Iterator<Item = &'a mut DescriptorProto> {
        messages
            .iter_mut()
            .filter(move |message| message.name() == name)
            .flat_map(|message| message.nested_type.iter_mut())
    }
}
